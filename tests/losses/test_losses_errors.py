"""Inputs and settings that the losses reject; the error names the argument, the constraint and the value."""

from __future__ import annotations

from typing import Any

import errors
import torch

from agentfly_kit import losses
from agentfly_kit.errors import AlignmentError, SettingsError

X, M = torch.zeros(2, 3), torch.ones(2, 3)


@errors.table(
    (lambda: losses.aggregate(X, M, "mean"), SettingsError, "got 'mean'"),
    (lambda: losses.aggregate(X, M, "fixed"), SettingsError, "given if and only if how='fixed', got None"),
    (lambda: losses.aggregate(X, M, "token_mean", denominator=3), SettingsError, "got 3 with 'token_mean'"),
    (lambda: losses.aggregate(X, M, "trajectory_mean"), SettingsError, "trajectory_index must be given"),
    (
        lambda: losses.aggregate(X, M, "trajectory_mean", trajectory_index=[1, 2, 3]),
        AlignmentError,
        "trajectory_index must have the shape (2,), got (3,)",
    ),
    (lambda: losses.ppo(X, X, X, M[:, :2]), AlignmentError, "mask must have the shape (2, 3), got (2, 2)"),
    (lambda: losses.ppo(X, X, torch.zeros(3), M), AlignmentError, "advantages must have the shape (2, 3), got (3,)"),
    (lambda: losses.ppo(X, X[:, :2], X, M), AlignmentError, "old_logprobs must have the shape (2, 3)"),
    (lambda: losses.ppo(X, X, X, M, clip=-0.1), SettingsError, "clip must be at least 0, got -0.1"),
    (lambda: losses.ppo(X, X, X, M, dual_clip=1.0), SettingsError, "dual_clip must be above 1, or None, got 1.0"),
    (lambda: losses.value(X, None, X, M, clip=0.5), SettingsError, "old_values must be given if clip is"),
    (lambda: losses.kl(X, X, "k4"), SettingsError, "got 'k4'"),
    (
        lambda: losses.adaptive_kl_coef(0.1, 0.1, target=0.0, steps=1),
        SettingsError,
        "horizon must be above 0",
    ),
    (lambda: losses.importance_weights(X, X, M, floor=3), SettingsError, "0 <= floor <= cap, got 3 and 2.0"),
)
async def test_errors(call: Any, error: Any, text: str) -> None:
    await errors.check(call, error, text)

"""Inputs and settings that the losses reject; the error names the argument, the constraint and the value."""

from typing import Any

import errors
import torch

import agentfly_kit as af

X, M = torch.zeros(2, 3), torch.ones(2, 3)


@errors.table(
    (lambda: af.losses.aggregate(X, M, "mean"), af.errors.SettingsError, "got 'mean'"),
    (lambda: af.losses.aggregate(X, M, "fixed"), af.errors.SettingsError, "given if and only if how='fixed', got None"),
    (
        lambda: af.losses.aggregate(X, M, "token_mean", denominator=3),
        af.errors.SettingsError,
        "got 3 with 'token_mean'",
    ),
    (lambda: af.losses.aggregate(X, M, "trajectory_mean"), af.errors.SettingsError, "trajectory_index must be given"),
    (
        lambda: af.losses.aggregate(X, M, "trajectory_mean", trajectory_index=[1, 2, 3]),
        af.errors.AlignmentError,
        "trajectory_index must have the shape (2,), got (3,)",
    ),
    (lambda: af.losses.ppo(X, X, X, M[:, :2]), af.errors.AlignmentError, "mask must have the shape (2, 3), got (2, 2)"),
    (
        lambda: af.losses.ppo(X, X, torch.zeros(3), M),
        af.errors.AlignmentError,
        "advantages must have the shape (2, 3), got (3,)",
    ),
    (lambda: af.losses.ppo(X, X[:, :2], X, M), af.errors.AlignmentError, "old_logprobs must have the shape (2, 3)"),
    (lambda: af.losses.ppo(X, X, X, M, clip=-0.1), af.errors.SettingsError, "clip must be at least 0, got -0.1"),
    (
        lambda: af.losses.ppo(X, X, X, M, dual_clip=1.0),
        af.errors.SettingsError,
        "dual_clip must be above 1, or None, got 1.0",
    ),
    (lambda: af.losses.value(X, None, X, M, clip=0.5), af.errors.SettingsError, "old_values must be given if clip is"),
    (lambda: af.losses.kl(X, X, "k4"), af.errors.SettingsError, "got 'k4'"),
    (
        lambda: af.losses.adaptive_kl_coef(0.1, 0.1, target=0.0, steps=1),
        af.errors.SettingsError,
        "horizon must be above 0",
    ),
    (
        lambda: af.losses.importance_weights(X, X, M, floor=3),
        af.errors.SettingsError,
        "0 <= floor <= cap, got 3 and 2.0",
    ),
)
async def test_errors(call: Any, error: Any, text: str) -> None:
    await errors.check(call, error, text)

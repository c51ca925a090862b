"""Inputs and settings that the losses reject; the error names the argument, the constraint and the value."""

import errors
import torch

import agentfly_kit as af

X, M = torch.zeros(2, 3), torch.ones(2, 3)


test_errors = errors.rejected(
    (lambda: af.losses.aggregate(X, M, "mean"), af.errors.SettingsError, "got 'mean'"),
    (
        lambda: af.losses.aggregate(X, M, "fixed"),
        af.errors.SettingsError,
        "given if and only if how='fixed', got None",
    ),
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
    (
        lambda: af.losses.ppo(X, X, X, M[:, :2]),
        af.errors.AlignmentError,
        "mask must have the shape (2, 3), got (2, 2)",
    ),
    (
        lambda: af.losses.ppo(X, X, torch.zeros(3), M),
        af.errors.AlignmentError,
        "advantages must have the shape (2, 3), got (3,)",
    ),
    (lambda: af.losses.ppo(X, X[:, :2], X, M), af.errors.AlignmentError, "old_logprobs must have the shape (2, 3)"),
    (
        lambda: af.losses.sapo(X, X, X, M, tau=0),
        af.errors.SettingsError,
        "tau must be a finite number above 0, got 0",
    ),
    (lambda: af.losses.kl(X, X, "k4"), af.errors.SettingsError, "got 'k4'"),
)

"""Inputs and settings that the estimators reject; the error names the argument, the constraint and the value."""

import math

import errors

import agentfly_kit as af
from agentfly_kit import advantages as adv

nan, inf = math.nan, math.inf
R, V, M = [0, 0, 0, 0, 0, 1], [0.2, 0.2, nan, 0.9, 0.5, 0.5], [1, 1, 0, 0, 1, 1]


test_errors = errors.rejected(
    (
        lambda: adv.grpo([0, inf], [0, 0]),
        ValueError,
        "rewards[1] must be a finite number or NaN for unscored, got inf",
    ),
    (
        lambda: adv.grpo([0, 1], [0, 0], std="unbiased"),
        af.errors.SettingsError,
        "'sample', 'population', None, got 'unbiased'",
    ),
    (lambda: adv.grpo([0, 1], [0, 0, 0]), af.errors.AlignmentError, "got 3 ids for 2 rewards"),
    (lambda: adv.grpo([[0], [1]], [0, 0]), af.errors.AlignmentError, "got (2, 1)"),
    (lambda: adv.maxrl([1, -1], [0, 0]), ValueError, "rewards[1] must be at least 0, got -1.0"),
    (lambda: adv.gdpo([1, 0], [0, 0]), af.errors.AlignmentError, "must have the shape (N, K)"),
    (lambda: adv.gdpo([[1, 0], [0, 1]], [0, 0], weights=[1]), af.errors.AlignmentError, "got 1 for 2 rewards"),
    (
        lambda: adv.trajectory_level([1, 1, 0], [0, 0, 0], trajectory_index=[0, 0, 0]),
        ValueError,
        "got 1 and 0 in groups 0 and 0 for rows 0 and 2",
    ),
    (lambda: adv.trajectory_level([1, 1], ["x", "y"], trajectory_index=[0, 0]), ValueError, "in groups 0 and 1"),
    (
        lambda: adv.gigpo([1, 0], [0, 0], turn_rewards=[[1], [0]], states=[["s"], ["s", "t"]]),
        af.errors.AlignmentError,
        "trajectory 1 must have a state per turn reward, got 2 for 1",
    ),
    (lambda: adv.branch_weights([["r"], ["r"]], [0, 0]), ValueError, "two leaves end in"),
    (lambda: adv.branch_weights([["r", "a"], ["x", "a", "b"]], [0, 0]), ValueError, "follows two different turns"),
    (lambda: adv.whiten([[0.0, nan]], [[1, 1]]), ValueError, "advantages[0, 1] must be a finite number"),
    (lambda: adv.reinforce_plus_plus([[-inf, 0]], [[1, 1]]), ValueError, "token_rewards[0, 0] must be a finite"),
    (lambda: adv.reinforce_plus_plus([[0.0, 1.0]], [[1, 0]]), ValueError, "token_rewards[0, 1] must be 0 or NaN"),
    (lambda: adv.reinforce_plus_plus([[0.0, -inf]], [[1, 0]]), ValueError, "token_rewards[0, 1] must be 0 or NaN"),
    (lambda: adv.gae([[0.0, 1.0]], [[0, 0.0]], [[1, 0]]), ValueError, "token_rewards[0, 1] must be 0 or NaN"),
    (lambda: adv.gae([[0.0, -inf]], [[0, 0.0]], [[1, 0]]), ValueError, "token_rewards[0, 1] must be 0 or NaN"),
    (lambda: adv.gae([[0, 0.0]], [[0, nan]], [[1, 1]]), ValueError, "a finite number at every action token, got nan"),
    (lambda: adv.gae(R, V, M, observations="step"), ValueError, "between the first and last action token, got nan"),
    (
        lambda: adv.gae([[0.0] * 3], [[0.0] * 3], [[1] * 3], turns=[[1, 2, 1]]),
        ValueError,
        "turn 1 reappears at",
    ),
    (
        lambda: adv.gae([[0.0]], [[0.0]], [[1]], turns=[[0]], observations="step"),
        af.errors.SettingsError,
        "with turns, observations must be 'skip'",
    ),
    (
        lambda: adv.gae([[0, 0.0]], [[0.0]], [[1, 1]]),
        af.errors.AlignmentError,
        "values must have the shape (1, 2), got (1, 1)",
    ),
    (
        lambda: adv.gae([[0, 0.0]], [[0.0, 0]], [1, 1]),
        af.errors.AlignmentError,
        "mask must have the shape (1, 2), got (2,)",
    ),
    (lambda: adv.gae([[0.0]], [[0.0]], [[1]], bootstrap=[nan]), ValueError, "bootstrap"),
    (lambda: adv.gae([[0.0]], [[0.0]], [[1]], bootstrap=[1, 2, 3]), af.errors.AlignmentError, "shape (1,), got (3,)"),
)

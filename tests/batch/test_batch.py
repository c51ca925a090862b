"""Collation: alignment of the tensors, reasons of dropped rows, and rejected trajectories."""

import math
from typing import Any

import pytest
import torch

import agentfly_kit as af

TASK = af.Task("t", ({"role": "user", "content": "?"},))


def row(
    *parts: tuple[str, int], reward: float | None = 1.0, group: str = "g", chain: int = 0, **more: Any
) -> af.Trajectory:
    """A trajectory of (kind, length) parts; token ids and logprobs count up from 1."""
    turns: list[af.Turn] = []
    at = 1
    for kind, n in parts:
        ids = tuple(range(at, at + n))
        at += n
        sampled = kind == "action"
        turns.append(
            af.Turn(
                kind,  # type: ignore[arg-type]
                "policy" if sampled else "task",
                ids,
                sampled=sampled,
                logprobs=tuple(-float(i) for i in ids) if sampled else None,
                entropies=tuple(float(i) for i in ids) if sampled else None,
                versions=(2,) * n if sampled else None,
                parent=turns[-1] if turns else None,
            )
        )
    return af.Trajectory(
        f"{group}/{chain}", TASK, group, chain, tuple(turns), more.pop("stop", "answered"), reward, **more
    )


def test_tensors_are_aligned() -> None:
    a = row(("prompt", 2), ("action", 2), ("observation", 1), ("action", 1), reward=0.5)
    b = row(("prompt", 1), ("action", 1), group="h", reward=-1.0, sampling=af.Sampling(temperature=0.7))
    batch = af.collate([a, b], torch.tensor([2.0, 3.0]))
    nan = math.nan
    assert batch.ids.tolist() == [[1, 2, 3, 4, 5, 6], [1, 2, 0, 0, 0, 0]]
    assert batch.mask.int().tolist() == [[0, 0, 1, 1, 0, 1], [0, 1, 0, 0, 0, 0]]
    assert batch.attention.int().tolist() == [[1] * 6, [1, 1, 0, 0, 0, 0]]
    for name, wanted in {
        "logprobs": [[nan, nan, -3, -4, nan, -6], [nan, -2, nan, nan, nan, nan]],
        "entropies": [[nan, nan, 3, 4, nan, 6], [nan, 2, nan, nan, nan, nan]],
        "advantages": [[nan, nan, 2, 2, nan, 2], [nan, 3, nan, nan, nan, nan]],
        "token_rewards": [[nan, nan, 0, 0, nan, 0.5], [nan, -1, nan, nan, nan, nan]],
    }.items():
        torch.testing.assert_close(getattr(batch, name), torch.tensor(wanted), equal_nan=True)
    assert batch.versions.tolist() == [[-1, -1, 2, 2, -1, 2], [-1, 2, -1, -1, -1, -1]]
    assert batch.lengths.tolist() == [6, 2]
    assert batch.groups.tolist() == [0, 1]
    assert batch.temperatures.tolist() == pytest.approx([1.0, 0.7])
    assert repr(batch) == "Batch(2 rows, 6 wide, 4 action tokens)"


@pytest.mark.parametrize("how", ["function", "tensor", "list", "per token", "none"])
def test_forms_of_advantages(how: str) -> None:
    given = [row(("prompt", 1), ("action", 2), chain=i, reward=r) for i, r in enumerate((1.0, 0.0, None, 1.0))]
    wanted = af.advantages.grpo([1.0, 0.0, None, 1.0], [0] * 4)[[0, 1, 3]]
    each: Any = {
        "function": af.advantages.grpo,
        "tensor": af.advantages.grpo([1.0, 0.0, None, 1.0], [0] * 4),
        "list": af.advantages.grpo([1.0, 0.0, None, 1.0], [0] * 4).tolist(),
        "per token": wanted[:, None].expand(3, 3),
        "none": None,
    }[how]
    batch = af.collate(given, each)
    assert len(batch) == 3
    if how == "none":
        assert torch.isnan(batch.advantages).all()
    else:
        torch.testing.assert_close(batch.advantages[:, 1], wanted)
        assert torch.isnan(batch.advantages[:, 0]).all()


def test_dropped_trajectories_have_a_reason() -> None:
    given = [
        row(("prompt", 1), ("action", 1)),
        row(("prompt", 1), ("action", 1), chain=1, reward=None, stop="error", error=af.Failure("tool put", "E", "x")),
        row(("prompt", 1), ("action", 1), chain=2, reward=None, stop="cancelled"),
        row(("prompt", 1), chain=3),
        row(("prompt", 1), ("forced", 2), chain=4),
        row(("prompt", 1), ("action", 1), chain=5, stop="max_turns"),
    ]
    batch = af.collate(given, af.advantages.grpo, truncated="mask")
    assert [t.id for t in batch.trajectories] == ["g/0"]
    assert [(d.trajectory, d.reason) for d in batch.dropped] == [
        ("g/1", "unscored (tool put)"),
        ("g/2", "unscored (cancelled)"),
        ("g/3", "no token was sampled by a policy"),
        ("g/4", "actions written by task, not sampled by a policy"),
        ("g/5", "truncated"),
    ]
    assert "left out" in batch._repr_html_() and ">truncated<" in batch._repr_html_()
    assert len(af.collate(given, af.advantages.grpo)) == 2


GOOD = row(("prompt", 1), ("action", 2))


def test_replace_uses_the_new_mask() -> None:
    batch = af.collate([row(("prompt", 2), ("action", 1), ("observation", 1))])
    wide = batch.attention.clone()
    wide[:, 0] = False
    given = batch.replace(advantages=torch.ones(1, 4), mask=wide)
    assert torch.isnan(given.advantages).tolist() == [[True, False, False, False]], (
        "NaN outside the new mask, not the old"
    )

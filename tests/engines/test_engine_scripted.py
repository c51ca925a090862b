"""ScriptedEngine: replaying texts, which are never trained."""

from typing import Any

import errors
import pytest
from agents import call, chat, scripted

import agentfly_kit as af

TASK = af.Task("t", ({"role": "user", "content": "What is 2+3?"},), {"answer": "5"})


async def test_scripted_tokens_have_mask_0_and_cannot_be_trained() -> None:
    rollout = await scripted([call("2+3"), "5"]).rollout([TASK])
    t = rollout.trajectories[0]
    assert not t.action_mask.any()
    assert chat().text(t.ids.tolist()).endswith("5<|im_end|>")
    errors.check(
        lambda: af.collate(rollout, [0.0]), af.errors.BatchError, "actions written by script, not sampled by a policy"
    )


async def test_scripted_ids_are_returned_unchanged() -> None:
    ids = (*chat().encode("5"), chat().stop_ids[0])
    t = (await scripted([ids]).rollout([TASK])).trajectories[0]
    assert (t.turns[1].ids, t.final) == (ids, "5")


async def test_a_script_that_is_too_short_raises() -> None:
    t = (await scripted([call("1+1")]).rollout([TASK])).trajectories[0]
    assert (t.stop, t.reward) == ("error", None)
    assert t.error is not None and "the script has 1 turns, but turn 2 was requested" in t.error.message


@pytest.mark.parametrize(("script", "shown"), [(["a", "b"], "2 turns"), (lambda t, n: "", "a function")])
def test_repr(script: Any, shown: str) -> None:
    assert repr(af.ScriptedEngine(script)) == f"ScriptedEngine({shown})"

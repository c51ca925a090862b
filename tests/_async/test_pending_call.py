"""Calls that report a missing await or an unknown keyword."""

import asyncio
import gc
import inspect
import re
from typing import Any

import errors
import pytest
from waiting import GUARD

import agentfly_kit as af
from agentfly_kit._async.pending_call import PendingCall, pending_call
from agentfly_kit.errors import _OTHER_NAMES


class Inherited:
    def __init__(self) -> None:
        self.ran = 0

    @pending_call
    async def step(self, n: int = 1) -> int:
        """Step."""
        await asyncio.sleep(0)
        self.ran += n
        return self.ran

    @pending_call
    async def fail(self) -> None:
        raise ValueError("inside")


class Chain(Inherited):
    """Messages show the class of the object, not the class that defines the method."""


@pending_call
async def evaluate(x: int) -> int:
    return x + 1


async def test_asyncio_accepts_it_as_a_coroutine() -> None:
    assert (Chain.step.__name__, Chain.step.__doc__) == ("step", "Step.")
    chain = Chain()
    chain.step(2).close()
    assert chain.ran == 0, "it does not run before it is awaited, and closing it does not warn"
    assert await asyncio.create_task(chain.step()) == 1
    assert await asyncio.gather(chain.step(), evaluate(1)) == [2, 2]
    assert await asyncio.wait_for(chain.step(), GUARD) == 3
    pending = evaluate(1)
    assert inspect.isawaitable(pending)
    assert asyncio.iscoroutine(pending)
    assert isinstance(pending, PendingCall)
    pending.close()
    await errors.check(chain.fail, ValueError, "inside")


@pytest.mark.parametrize(
    ("function", "keyword", "close"),
    [
        (af.Agent, "tool", "tools"),
        (af.Agent.rollout, "groupsize", "group_size"),
        (af.LocalEngine, "slot", "slots"),
        (af.PPOConfig, "minibatches", "minibatch"),
        (af.Sampling, "temp", "temperature"),
        (af.TrainConfig, "tasks_per_iteration", "tasks_per_step"),
        (af.collate, "filter", "filters"),
        (af.evaluate, "samples", "group_size"),
        (af.ppo_step, "referense", "reference"),
        (af.train, "eval_task", "eval_tasks"),
        (af.evaluate, "n", "group_size"),
        (af.collate, "advantage", "advantages"),  # a keyword of af.TrainConfig; so for each in `_OTHER_NAMES`
        *(
            (eval(f), other, name)
            for f, table in _OTHER_NAMES.items()
            for name in table
            for other in table[name].split()
        ),
    ],
)
def test_an_unknown_keyword_names_the_closest_one(function: Any, keyword: str, close: str) -> None:
    errors.check(
        lambda: function(**{keyword: 1}),
        TypeError,
        re.compile(rf"\(\) got an unexpected keyword '{keyword}'; did you mean '{close}'\?"),
    )
    gc.collect()  # no warning of a call that was never awaited
    assert close in inspect.signature(function).parameters, "help and completion show the signature"


test_a_keyword_of_another_function_is_named_with_it = errors.rejected(
    (lambda: af.TrainConfig(max_new_tokens=9), TypeError, "did you mean 'max_tokens' of af.Sampling?"),  # type: ignore[call-arg]
    (lambda: af.TrainConfig(temperature=1), TypeError, "did you mean 'temperature' of af.Sampling?"),  # type: ignore[call-arg]
)


async def test_a_call_that_cannot_begin_warns_of_no_missing_await() -> None:
    errors.check(
        lambda: af.evaluate(nonsense_xyz=1),  # type: ignore[call-arg]
        TypeError,
        "its keywords are agent, tasks, group_size",
    )
    await errors.check(lambda: af.evaluate(), TypeError, "missing 2 required positional arguments")  # type: ignore[call-arg]
    gc.collect()


async def test_a_second_await_is_rejected() -> None:
    pending = evaluate(1)
    await pending
    await errors.check(lambda: pending, RuntimeError, "evaluate(...) was already awaited; call it again")


async def test_the_repr_explains_the_missing_await() -> None:
    pending = Chain().step()
    assert repr(pending) == "<chain.step(...) has not run: write `await chain.step(...)`>"
    del pending  # no warning, because the repr was shown


def test_a_missing_await_warns_once() -> None:
    def forget() -> None:
        Chain().step()
        gc.collect()

    with pytest.warns(RuntimeWarning, match=r"chain\.step\(\.\.\.\) was never awaited: write `await chain") as got:
        forget()
    assert len(got) == 1


def test_attributes_of_the_result_raise_not_awaited() -> None:
    pending = Chain().step()
    errors.check(
        lambda: pending.text,
        af.errors.NotAwaited,
        "chain.step(...) has not run, so it has no .text; write (await",
    )
    assert not hasattr(pending, "_repr_html_")
    pending.close()


async def test_a_task_cancelled_before_it_starts_never_runs() -> None:
    chain = Chain()
    task = asyncio.create_task(chain.step())
    task.cancel()
    await errors.check(lambda: task, asyncio.CancelledError)
    assert chain.ran == 0

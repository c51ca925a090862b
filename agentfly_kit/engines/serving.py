"""Start vLLM servers on this machine: `async with serve_vllm(policy) as server: engine = server.engine()`.

The server process, `python -m agentfly_kit.engines.serving PID ...`, is killed when the process with the id PID ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path
from typing import Any

from agentfly_kit._display import Displayable
from agentfly_kit.engines.openai import OpenAIEngine
from agentfly_kit.engines.vllm.engine import VLLMEngine
from agentfly_kit.engines.vllm.host import advice, exit_with
from agentfly_kit.errors import EngineError
from agentfly_kit.policy.policy import Policy

# Name of the model in requests.
_MODEL = "policy"
_POLL_SECONDS = 0.2


class VLLMServer(Displayable):
    """A vLLM server that runs in a separate process and samples from a policy; `OpenAIEngine.update` updates the
    weights.

    Use `server = await serve_vllm(policy).start()` and later `await server.close()`, or `async with`. The server also
    stops when this process ends or is killed. The server listens on the loopback interface only, because any client
    could change its weights through the development endpoints. To use the server from another machine, open a tunnel
    (`ssh -L`).

    Args:
        policy: The policy, or a folder or hub name of a model.
        port: Port to listen on; 0 selects a free port.
        environment: Additional environment variables, such as `{"CUDA_VISIBLE_DEVICES": "1"}`.
        engine_args: Arguments of vLLM's AsyncEngineArgs; see `VLLMEngine` for the defaults.
    """

    def __init__(
        self,
        policy: Policy | str | Path,
        *,
        port: int = 0,
        environment: dict[str, str] | None = None,
        **engine_args: Any,
    ) -> None:
        # This engine, which is never started, only provides the model's folder and settings.
        self._model = VLLMEngine(policy, **engine_args)
        self._environment = environment or {}
        self.port = port
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="agentfly-server-"))
        self._finalizer: Any = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        # Log of vLLM and its processes.
        self.log = self._folder / "vllm.log"
        self._ready = False

    @property
    def url(self) -> str:
        """Address of the API, for `OpenAIEngine`."""
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def pid(self) -> int | None:
        """Process id of the server, which is also its process group id; None if the server is not running."""
        running = self._process is not None and self._process.poll() is None
        return self._process.pid if running and self._process is not None else None

    def __repr__(self) -> str:
        state = "not running" if self.pid is None else "running" if self._ready else "starting"
        return f"VLLMServer({self.url}, {state})"

    def engine(self, **settings: Any) -> OpenAIEngine:
        """Return an engine that samples token ids on this server. `settings` are those of `OpenAIEngine`."""
        engine = OpenAIEngine(self.url, _MODEL, tokens="exact", stop_ids=self._model.stop_ids, **settings)
        # Do not garbage-collect the server while an engine is in use.
        weakref.finalize(engine, lambda _: None, self)
        return engine

    async def start(self) -> VLLMServer:
        """Start the server if it is not running, and wait until it is ready, which takes up to a minute.

        Returns:
            This server.

        Raises:
            EngineError: If the server does not start; the message contains the end of its log and possible remedies.
        """
        with socket.socket() as holder:  # holds a free port until the server, which sets SO_REUSEADDR too, listens
            if self.pid is None:
                self._ready = False
                if self.port == 0:
                    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    holder.bind(("127.0.0.1", 0))
                    self.port = holder.getsockname()[1]
                self._spawn()
            try:
                while not self._ready:
                    if self.pid is None:
                        raise EngineError(f"the vLLM server did not start. {advice(self.log)}")
                    await asyncio.sleep(_POLL_SECONDS)
                    self._ready = await asyncio.to_thread(_answers, self.port)
            except BaseException:
                _kill(self._process)
                raise
        return self

    def _spawn(self) -> None:
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(os.getpid()), *self._flags()],
                env=os.environ | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"} | self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # an interrupt of a notebook is sent to the kernel's whole process group
            )
        self._finalizer.detach()
        self._finalizer = weakref.finalize(self, _stop, self._process, self._folder)

    def _flags(self) -> list[str]:
        settings = self._model._settings()
        flags = ["--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", _MODEL]
        flags.append("--disable-uvicorn-access-log")  # the log would contain one line per request
        for name, value in settings.items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                flags.append(f"--{flag}" if value else f"--no-{flag}")
            elif value is not None:
                flags += [f"--{flag}", value if isinstance(value, str) else json.dumps(value)]
        return flags

    async def close(self) -> None:
        """Stop the server and its processes. Idempotent."""
        await asyncio.shield(asyncio.to_thread(_kill, self._process))

    async def __aenter__(self) -> VLLMServer:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.close()


serve_vllm = VLLMServer


def _answers(port: int) -> bool:
    """Return True if the server is ready for requests."""
    import httpx2

    try:
        return bool(httpx2.get(f"http://127.0.0.1:{port}/health", timeout=5, trust_env=False).is_success)
    except httpx2.HTTPError:
        return False


def _kill(process: subprocess.Popen[bytes] | None) -> None:
    """Kill the server's process group, because vLLM's CPU worker would not exit by itself."""
    if process is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _stop(process: subprocess.Popen[bytes], folder: Path) -> None:
    _kill(process)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    import runpy

    exit_with(int(sys.argv.pop(1)), -os.getpgrp())
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)

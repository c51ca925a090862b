"""Without os.fork, the package can be imported and trains. Only sandboxes raise an error, which gives the reason."""

import subprocess
import sys

import pytest
import waiting

# Windows has none of these names and modules. The standard library and other packages are imported before they are
# removed, because this Python's own modules need them.
PREPARE = """
import asyncio, concurrent.futures, multiprocessing, os, signal, socket, subprocess, sys, tempfile
import anywidget, IPython, ipywidgets, pandas, plotly, pydantic, safetensors.torch, torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM
for name in ("fork", "geteuid", "getuid", "killpg", "register_at_fork", "sched_getaffinity", "setsid"):
    delattr(os, name)
for name in ("SIGALRM", "SIGCHLD", "SIGKILL", "setitimer"):
    delattr(signal, name)
for name in ("fcntl", "grp", "pty", "pwd", "resource", "termios"):
    sys.modules[name] = None
sys.platform = "win32"
"""
USE = """
import importlib, pkgutil
import agentfly_kit as af
from agentfly_kit.errors import IsolationError

for module in pkgutil.walk_packages(af.__path__, "agentfly_kit."):    # what runs inside sandboxes needs Linux or macOS
    if not any(part in module.name for part in (".inside", ".worker", "._data", ".__main__")):
        importlib.import_module(module.name)

async def main():
    tasks, policy = af.load_tasks("lookup"), af.tiny.policy("lookup")
    rollout = await af.envs.lookup.agent(policy).rollout(tasks.train[:2], group_size=2)
    assert all(chain.reward is not None for chain in rollout), [chain.failure for chain in rollout]
    for isolation in (None, "none"):
        try:
            await af.PythonSandbox(isolation=isolation).start()
        except IsolationError as error:
            print(error)
    print(af.sandbox_report().best == "", af.doctor().findings[0].ok)

asyncio.run(main())
"""


@pytest.mark.real  # imports everything in a new interpreter
def test_all_but_sandboxes_works_without_fork() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PREPARE + USE], capture_output=True, text=True, timeout=waiting.GUARD
    )
    assert done.returncode == 0, done.stderr
    *refusals, last = done.stdout.splitlines()
    assert len(refusals) == 2
    assert all("sandboxes need os.fork" in line and "WSL 2" in line for line in refusals), refusals
    assert last == "True True"

"""Real, unmodified agents of other frameworks sample the same tokens."""

import ast
import atexit
import functools
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import packages
import pytest
from waiting import GUARD

FOLDER = Path(__file__).parent / "frameworks"
PACKAGES = {
    "with_openai": "openai", "with_langchain": "langchain_openai", "with_langgraph": "langgraph",
    "with_openai_agents": "agents", "with_pydantic_ai": "pydantic_ai", "with_autogen": "autogen_agentchat",
    "with_smolagents": "smolagents",
}  # fmt: skip
# SHA-256 of the agent files. They are ordinary programs of their frameworks: a change of this package that requires a
# change of one of them breaks the agents of users.
DIGESTS = {
    "with_openai": "8b86afb0ce287bb91a7aed8d4ccb3c69081a179d302c92e853f3dca58eb6d781",
    "with_langchain": "b66723748b09d1d15e40d1708a0dd03630aaf5ec60615711e72c13521c337042",
    "with_langgraph": "849f100995880a7ff376471da63d3997c40a94c02bba7916b044ac1dd6802304",
    "with_openai_agents": "6fa4c2d9d89578b9328085fe5a78f19799038c6264b12064574971d0510d67e0",
    "with_pydantic_ai": "18ca4652081b991aabcd00bc5f080ca074ae96a177d5c50779c329ce290eda7b",
    "with_autogen": "5fbf22d996a13149d1c708083c69b5ebbfb9ce88c9ef1b2ba0d30145a09aee05",
    "with_smolagents": "adc6b56d466cff7d076359032a62afbc64bf70c913b520274c4f6956913925c4",
}


@functools.cache
def chains_of(module: str, function: str = "solve") -> list[dict[str, Any]]:
    """Run an agent in a new process, so that the frameworks do not influence each other."""
    if module == "with_autogen":
        return _run(module, function, autogen())
    if importlib.util.find_spec(PACKAGES[module]) is None:
        pytest.skip(f"not installed: {PACKAGES[module]}")
    return _run(module, function, FOLDER)


@functools.cache
def autogen() -> Path:
    """Install AutoGen in a folder. It requires protobuf < 6, which other packages of the environment do not accept."""
    folder = Path(tempfile.mkdtemp(prefix="agentfly-autogen-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    versions = "autogen-agentchat==0.7.5 autogen-core==0.7.5 autogen-ext==0.7.5"
    packages.install(folder, f"{versions} jsonref protobuf==5.29.6")
    return folder


def _run(module: str, function: str, path: Path) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, str(FOLDER / "run.py"), module, function, "16"],
        capture_output=True,
        text=True,
        timeout=GUARD,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(FOLDER), str(path)])},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    chains: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])["chains"]
    assert len(chains) == 16 and not any(chain["error"] for chain in chains), chains
    return chains


def test_the_agents_are_unchanged_and_import_nothing_of_this_package() -> None:
    for path in FOLDER.glob("with_*.py"):
        assert hashlib.sha256(path.read_bytes()).hexdigest() == DIGESTS[path.stem], path
        names = {
            (getattr(node, "module", None) or node.names[0].name).partition(".")[0]
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Import | ast.ImportFrom)
        }
        assert "agentfly_kit" not in names, path
    assert {path.stem for path in FOLDER.glob("with_*.py")} == set(PACKAGES)


@pytest.mark.real
@pytest.mark.parametrize(
    ("module", "function"),
    [
        pytest.param(*each, marks=pytest.mark.long)
        for each in [
            ("with_langchain", "solve"), ("with_langgraph", "solve"), ("with_openai_agents", "solve_streaming"),
            ("with_pydantic_ai", "solve"), ("with_pydantic_ai", "solve_responses"),
        ]
    ]
    + [("with_openai_agents", "solve")],
)  # fmt: skip
def test_every_framework_that_sends_back_the_history_gives_the_same_tokens(module: str, function: str) -> None:
    reference = chains_of("with_openai")
    assert {len(chain["rows"]) for chain in reference} == {1}
    assert any(chain["reward"] == 1 for chain in reference)
    assert chains_of(module, function) == reference


@pytest.mark.long
def test_autogen_ends_after_one_tool_call_with_the_same_first_action() -> None:
    """AutoGen wraps the task in its own messages, but the rows and first actions are the same."""
    plain = chains_of("with_autogen", "solve_without_reflection")
    assert {len(chain["rows"]) for chain in plain} == {1}
    assert plain == chains_of("with_openai")
    # The reflection request has no tools, so its prompt differs, and chains that call a tool have a second row.
    for one, two in zip(plain, chains_of("with_autogen"), strict=True):
        called = len(one["logprobs"]) > 1
        assert len(two["rows"]) == 1 + called
        assert two["logprobs"][0] == one["logprobs"][0]


@pytest.mark.long
def test_smolagents_runs_in_a_thread() -> None:
    """The system prompt of about 1,500 tokens exceeds the tiny policy's context, so every chain ends there."""
    assert {chain["stop"] for chain in chains_of("with_smolagents")} == {"context_full"}

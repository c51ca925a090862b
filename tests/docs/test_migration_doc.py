"""The snippets of docs/migration.md run, in order and in one namespace, as in a notebook."""

from __future__ import annotations

import ast
import inspect
import linecache
import re
from typing import Any

import agents
import pytest
from paths import ROOT

TEXT = (ROOT / "docs" / "migration.md").read_text()
SNIPPETS = [
    (TEXT[: match.start()].count("\n") + 2, match[1], match[2])
    for match in re.finditer(r"```python(?: (ours|trl|verifiers))?\n(.*?)```", TEXT, re.DOTALL)
]


async def _run(kinds: set[str]) -> dict[str, Any]:
    """Run the snippets of these kinds in one namespace, and return it."""
    names: dict[str, Any] = {"__name__": "migration"}
    for line, kind, source in SNIPPETS:
        if kind not in kinds:
            continue
        name = f"<migration.md:{line}>"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        code = compile(source, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        result = eval(code, names)
        if inspect.iscoroutine(result):
            await result
    return names


async def test_every_snippet_of_ours_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names = await _run({"ours", "trl"})
    assert [kind for _, kind, _ in SNIPPETS].count("ours") >= 10
    assert names["runs"].frame.loc[names["runs"][0].path.name, "step"] == 1
    assert len(names["rollout"]) == 16


@pytest.mark.real
async def test_the_snippets_of_verifiers_score_a_rollout(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(
        "verifiers.v1", reason="needs verifiers 0.4, which requires openai < 3: uv pip install verifiers"
    )
    import agentfly_kit as af

    names = await _run({"ours", "trl", "verifiers"})
    for text, reward in (("5", 1.0), ("6", 0.0)):
        script = [agents.call("2+3"), text]
        agent = names["agent"].replace(engine=af.ScriptedEngine(script), reward=names["by_verifiers"])
        t = (await agent.rollout(names["sums"])).trajectories[0]
        assert t.error is None and (t.reward, t.metrics["exact"], len(t.tool_calls)) == (reward, reward, 1)


@pytest.mark.real
def test_the_snippets_of_trl_are_accepted_by_trl() -> None:
    pytest.importorskip("trl")
    from test_trl import config, grpo_trainer

    names: dict[str, Any] = {}
    for _, kind, source in SNIPPETS:
        if kind == "trl":
            exec(source, names)
    policy = agents.fresh()
    import tempfile
    import warnings
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        policy.chat.tokenizer.response_template = __import__("agentfly_kit").trl.response_template()
        args = config(Path(folder), max_steps=1)
        grpo_trainer(policy, args, reward_funcs=names["exact"])
        counting = grpo_trainer(policy, args, reward_funcs=[], environment_factory=names["Counter"])
    assert [tool.__name__ for tool in counting.tools] == ["increment"]

"""The snippets of docs/migration.md run, in order and in one namespace, as in a notebook."""

from __future__ import annotations

import ast
import inspect
import linecache
import re
from typing import Any

import pytest
from paths import ROOT

TEXT = (ROOT / "docs" / "migration.md").read_text()
SNIPPETS = [
    (TEXT[: match.start()].count("\n") + 2, match[1], match[2])
    for match in re.finditer(r"```python(?: (ours|trl))?\n(.*?)```", TEXT, re.DOTALL)
]


async def test_every_snippet_of_ours_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"__name__": "migration"}
    ours = 0
    for line, kind, source in SNIPPETS:
        if kind is None:
            continue
        ours += kind == "ours"
        name = f"<migration.md:{line}>"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        code = compile(source, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        result = eval(code, names)
        if inspect.iscoroutine(result):
            await result
    assert ours >= 10
    assert names["runs"].frame.loc[names["runs"][0].path.name, "step"] == 1
    assert len(names["rollout"]) == 16


@pytest.mark.real
def test_the_snippets_of_trl_are_accepted_by_trl() -> None:
    pytest.importorskip("trl")
    import agents
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

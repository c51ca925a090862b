"""The snippets of docs/migration.md run, in order and in one namespace, as in a notebook."""

import ast
import inspect
import linecache
import operator
import re
from pathlib import Path
from typing import Any

import agents
import packages
import pytest
from paths import ROOT
from recipes.base import RESPONSE_TEMPLATE

import agentfly_kit as af

TEXT = (ROOT / "docs" / "migration.md").read_text()
SNIPPETS = [
    (TEXT[: match.start()].count("\n") + 2, match[1], match[2])
    for match in re.finditer(r"```python(?: (ours|trl|verifiers|art|tinker))?\n(.*?)```", TEXT, re.DOTALL)
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


@pytest.mark.parametrize("name", af._REMOVED)
def test_a_removed_name_names_its_replacement(name: str) -> None:
    module, _, last = name.rpartition(".")
    message = f"agentfly_kit.{name} was removed; use {af._REMOVED[name]}"
    with pytest.raises(AttributeError, match=re.escape(message)):
        getattr(getattr(af, module) if module else af, last)
    for replacement in re.findall(r"\baf\.(\w+(?:\.\w+)*)", message):
        operator.attrgetter(replacement)(af)
    rows = TEXT.partition("| 0.2 | 0.3 |\n")[2].splitlines()
    assert any(f"`{name}`" in row.split(" | ")[0] for row in rows)


@pytest.mark.long
def test_the_snippets_of_verifiers_score_a_rollout(tmp_path: Path) -> None:
    packages.install(tmp_path, VERIFIERS)
    packages.run(tmp_path, "import asyncio, test_migration_doc as t; asyncio.run(t.score_with_verifiers())")


async def score_with_verifiers() -> None:
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

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        policy.chat.tokenizer.response_template = RESPONSE_TEMPLATE
        args = config(Path(folder), max_steps=1)
        grpo_trainer(policy, args, reward_funcs=names["exact"])
        counting = grpo_trainer(policy, args, reward_funcs=[], environment_factory=names["Counter"])
    assert [tool.__name__ for tool in counting.tools] == ["increment"]


# It requires openai < 3. Its dependencies are pinned, because prime-sandboxes does not work with newer ones.
VERIFIERS = (
    "verifiers==0.4.0 openai==2.54.0 anthropic==2.12.0 gepa==0.1.4 httpx2==2.16.2 loguru==0.7.3 aiofiles==25.1.0 "
    "math-verify==0.9.0 renderers==0.1.12 tomli-w==1.2.0 prime-pydantic-config==0.4.3 prime-runs==0.1.4 "
    "prime-sandboxes==0.5.1 prime-tunnel==0.1.15 connectrpc==0.11.1 pyqwest==0.12.0 protobuf-py==0.1.1 "
    "protobuf-py-ext==0.1.1"
)
ART = (
    "openpipe-art==0.5.18 litellm==1.82.0 polars polars-runtime-32 tblib setproctitle nest-asyncio fastuuid h2 hpack "
    "hyperframe"
)
TINKER = "tinker==0.38.0 tinker-cookbook==0.6.1 tml-renderers chz pyqwest"


@pytest.mark.long
def test_the_snippet_of_art_runs_as_a_harness(tmp_path: Path) -> None:
    packages.install(tmp_path, ART)
    (source,) = (source for _, kind, source in SNIPPETS if kind == "art")
    code = Path(__file__).with_name("art_harness.py").read_text()
    printed = packages.run(tmp_path, code, source, LITELLM_LOCAL_MODEL_COST_MAP="True")
    assert printed.splitlines()[-1] == f"{[[1.0] * 8, [0.0] * 8]} 16"


@pytest.mark.long
async def test_the_snippet_of_tinker_is_an_environment_of_tinker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages.install(tmp_path, TINKER)
    monkeypatch.syspath_prepend(tmp_path)
    from tinker_cookbook import renderers  # type: ignore[import-not-found, unused-ignore]
    from tinker_cookbook.rl import types  # type: ignore[import-not-found, unused-ignore]

    tokenizer = agents.fresh().chat.tokenizer
    names: dict[str, Any] = {"Env": types.Env, "StepResult": types.StepResult}
    (source,) = (source for _, kind, source in SNIPPETS if kind == "tinker")
    exec(source, names)
    env = names["SumEnv"]()
    env.renderer = renderers.get_renderer("role_colon", tokenizer)
    env.messages, env.answer, env.stop_condition = [{"role": "user", "content": "2+3"}], "5", []
    observation, _ = await env.initial_observation()
    assert observation.to_ints()
    for text, reward in (("5", 1.0), ("6", 0.0)):
        result = await env.step(tokenizer.encode(text, add_special_tokens=False))
        assert (result.reward, result.episode_done) == (reward, True)

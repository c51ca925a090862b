"""Any class can be a sandbox, as in docs/architecture.md, and chains that hold a sandbox can be forked."""

import re
from typing import Any

from agents import chat
from paths import ROOT

import agentfly_kit as af

TASK = af.Task("t", ({"role": "user", "content": "?"},))


def write(name: str, **arguments: str) -> str:
    written = ", ".join(f'"{key}": "{value}"' for key, value in arguments.items())
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{{written}}}}}\n</tool_call>'


async def test_the_sandbox_class_of_the_documentation():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "class Notes" in block]
    assert len(code.split("@af.tool")[0].splitlines()) <= 10
    cell: dict[str, Any] = {"af": af, "chat": chat(), "engine": af.ScriptedEngine([write("note", text="b"), "end"])}
    exec(compile(code, "cell", "exec"), cell)
    agent = cell["agent"]
    for trajectory in (await agent.rollout([TASK], group_size=64)).trajectories:
        assert [c.result.observation for c in trajectory.tool_calls] == ["1"]
    chain = agent.chain(TASK)
    chain.force(write("note", text="a"))
    await chain.act()
    for each in (chain, await chain.fork()):
        each.force(write("note", text="b"))
        await each.act()
        trajectory = await each.finish()
        assert [c.result.observation for c in trajectory.tool_calls] == ["1", "2"]
    await agent.pools[0].close()

"""The code of docs/tools.md runs from top to bottom."""

import ast
import inspect
import linecache
import re
from pathlib import Path
from typing import Any

from paths import ROOT


async def test_the_code_of_the_page_runs(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "tools.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": "tools_page"}
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", text, re.DOTALL)):
        file = f"<tools.md {number}>"
        linecache.cache[file] = (len(block), None, block.splitlines(keepends=True), file)
        code = compile(block, file, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        result = eval(code, names)
        if inspect.isawaitable(result):
            await result
    for name in ("sums", "tables"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "SKILL.md").write_text(f"---\ndescription: how to do {name}\n---\nWrite {name}.")
    tool = names["read_skill_tool"](tmp_path)
    assert tool.description.endswith("- sums: how to do sums\n- tables: how to do tables")
    assert "Write tables." in (await tool.try_(name="tables")).observation
    assert not (await tool.try_(name="../tables")).ok
    before = tool.fingerprint
    (tmp_path / "sums" / "SKILL.md").write_text("---\ndescription: how to do sums\n---\nCount.")
    assert names["read_skill_tool"](tmp_path).fingerprint != before

"""The scripts in examples/ run and produce the documented results."""

import runpy

import pytest
from paths import ROOT


@pytest.mark.real
async def test_the_one_page_example_learns() -> None:
    text = (ROOT / "examples" / "one_page.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 110
    success = await runpy.run_path(str(ROOT / "examples" / "one_page.py"))["main"]()
    assert success[0] < 0.45 and success[-1] > 0.75, success

"""Tools written as text: parsed here, executed only in the sandbox."""

import functools
import os
import random
from pathlib import Path
from typing import Any

import dice
import pytest
from cancelling import patient_sandboxes
from waiting import GUARD

import agentfly_kit as af

SOURCE = '''
def area(width: float, height: float = 1.0, unit: Literal["m", "km"] = "m", notes: list[str] | None = None) -> str:
    """Compute the area of a rectangle.

    Args:
        width: width of the rectangle.
        height: height of the rectangle.
        unit: unit of both.
        notes: remarks.
    """
    import math
    return f"{math.floor(width * height)} {unit}2"
'''


def one(body: str, arguments: str = "") -> str:
    return f'def f({arguments}):\n    """Do it."""\n    {body}\n'


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    patient_sandboxes(monkeypatch)


made_from = functools.partial(af.Tool.from_source, timeout=GUARD)


async def test_the_function_runs_in_the_sandbox_with_its_schema() -> None:
    made = made_from(SOURCE)
    assert made.name == "area" and made.source == SOURCE and made.sandbox_types == (af.PythonSandbox,)
    properties = made.schema["function"]["parameters"]["properties"]
    assert properties["unit"]["enum"] == ["m", "km"] and properties["height"]["default"] == 1.0
    assert properties["width"]["description"] == "width of the rectangle."
    assert (await made.try_(width=2.5, height=2)).observation == "5 m2"
    assert "was not run" in (await made.try_(width="wide")).observation


async def test_parameters_of_compound_types() -> None:
    arguments = "a: list[int | None], b: Optional[int] = None, c: Union[int, str] = 1, d: dict[str, list[int]] = {}"
    described = "\n\n    Args:\n" + "".join(f"        {name}: {name}.\n" for name in "abcd")
    made = made_from(one("return [a, b, c, d]", arguments).replace("Do it.", "Do it." + described))
    assert (await made.try_(a=[1, None], c="x", d={"k": [2]})).observation == '[[1,null],null,"x",{"k":[2]}]'
    for wrong in ({"a": ["x"]}, {"b": "x"}, {"c": []}, {"d": []}, {"d": {"k": ["x"]}}):
        assert "was not run" in (await made.try_(**{"a": [1]} | wrong)).observation


async def test_every_tool_runs_its_own_body_also_after_the_model_redefined_it() -> None:
    first, second = (made_from(one(f"return {n}"), name=f"tool{n}") for n in (1, 2))
    async with af.Pool(af.PythonSandbox, size=1) as pool:
        sandbox: Any
        assert [(await t.try_(pool=pool)).observation for t in (first, second, first)] == ["1", "2", "1"]
    async with af.PythonSandbox() as sandbox:
        await sandbox.run("def f(): return 3", timeout=GUARD)
        from agentfly_kit.tools.source import parse_source, sandboxed

        assert (await sandboxed(parse_source(one("return {'a': 1}"), GUARD))(sandbox)).stdout == '{"a":1}\n'
    assert first.fingerprint != second.fingerprint
    assert af.ToolSet([first, second]) == af.ToolSet([made_from(one("return 1"), name="tool1"), second])


async def test_failures_of_the_function_are_observations() -> None:
    raises, exits = made_from(one("return 1 / 0")), made_from(one("import os; os._exit(3)"))
    endless = af.Tool.from_source(one("while True: pass"), timeout=0.5)
    results = [await made.try_() for made in (raises, exits, endless)]
    assert [(result.ok, result.error) for result in results] == [(False, None)] * 3
    assert "ZeroDivisionError" in results[0].observation


_PIECES = (
    "import os; os.environ['AGENTFLY_CANARY'] = '1'", "def f(): os.environ['AGENTFLY_CANARY'] = '1'", "@evil",
    "def g(a: evil()): pass", "def h(a=evil()): pass", '    """Do it."""', "    return 1", "class A(evil()): pass",
    "lambda: 0", "\\", "\t", "if evil(): pass", "evil()", "f'{evil()}'", "while evil(): pass", "\x0c", "def f(a: int):",
    '    """Do it.\n\n    Args:\n        a: a.\n    """', "(" * 50, "async def f(): evil()", "    yield evil()",
)  # fmt: skip


def _try_random_sources(count: int, monkeypatch: pytest.MonkeyPatch) -> int:
    def evil(*_: Any) -> Any:
        raise AssertionError("code of a tool was executed in this process")

    monkeypatch.setattr("builtins.evil", evil, raising=False)
    monkeypatch.delenv("AGENTFLY_CANARY", raising=False)
    rng = random.Random(dice.seed())
    accepted = 0
    for _ in range(count):
        pieces = rng.choices(_PIECES, k=rng.randint(1, 5))
        if rng.random() < 0.3:
            pieces = [_PIECES[16], _PIECES[17], *(f"    {piece}" for piece in pieces)]
        try:
            made = af.Tool.from_source("\n".join(pieces))
        except af.errors.ToolSchemaError:
            continue
        accepted += 1
        assert made.fingerprint and made.schema and repr(made) and af.ToolSet([made])
    assert "AGENTFLY_CANARY" not in os.environ
    return accepted


def test_random_sources_are_never_executed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _try_random_sources(500, monkeypatch) > 5, "some sources must be tools, else the test shows nothing"


@pytest.mark.long
def test_ten_thousand_random_sources_are_never_executed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _try_random_sources(10_000, monkeypatch) > 100


async def test_a_tool_cannot_write_files_of_the_host(tmp_path: Path) -> None:
    file = tmp_path / "canary"
    await made_from(one(f"open({str(file)!r}, 'w').write('x')")).try_()
    if (await _isolation()) == "none":
        pytest.skip("this machine has no isolation, which lets code in a sandbox write files of the user")
    assert not file.exists()


async def _isolation() -> str | None:
    async with af.PythonSandbox() as sandbox:
        return sandbox.isolation

"""Fields are described in the docstring of their class, where `?`, Shift-Tab and help() find them."""

import ast
import dataclasses
import inspect
import itertools
import re
from pathlib import Path
from typing import Any

import pytest

import agentfly_kit as af
from agentfly_kit import samples, trajectories, types
from agentfly_kit.agent.progress import ChainHooks, ChainKey
from agentfly_kit.batch.batch import Dropped

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = sorted((ROOT / "agentfly_kit").rglob("*.py")) + sorted((ROOT / "widgets").rglob("*.py"))
PUBLIC = {name: getattr(af, name) for name in af._WHERE} | {
    name: value
    for module in (types, samples, trajectories)
    for name, value in vars(module).items()
    if getattr(value, "__module__", "") == module.__name__
}
DATACLASSES = {n: v for n, v in PUBLIC.items() if isinstance(v, type) and dataclasses.is_dataclass(v)}
DATACLASSES |= {cls.__name__: cls for cls in (ChainHooks, ChainKey, Dropped)}  # values of public attributes
SECTION = re.compile(r"^(?:Args|Attributes):\n((?: .*\n?|\n(?= ))*)", re.MULTILINE)


def public_fields(cls: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(cls) if not field.name.startswith("_")}


def described(doc: str) -> list[str]:
    """Return the names in the `Args:` and `Attributes:` sections of a docstring."""
    entries = [
        line for section in SECTION.findall(doc) for line in re.findall(r"^ {4}(\S[^:\n]*)", section, re.MULTILINE)
    ]
    return [name for entry in entries for name in entry.removesuffix(", and any other keyword").split(", ")]


def test_no_string_literal_stands_below_an_assignment() -> None:
    """No tool displays such strings. Describe a field in the class docstring, and anything else in a comment above."""
    wrong = []
    for path in LIBRARY:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for body in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
                for before, each in itertools.pairwise(body) if isinstance(body, list) else ():
                    if (
                        isinstance(before, ast.Assign | ast.AnnAssign)
                        and isinstance(each, ast.Expr)
                        and isinstance(each.value, ast.Constant)
                        and isinstance(each.value.value, str)
                    ):
                        wrong.append(f"{path.relative_to(ROOT)}:{each.lineno} {each.value.value.splitlines()[0]}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", DATACLASSES)
def test_a_public_dataclass_names_each_field_in_its_docstring(name: str) -> None:
    cls = DATACLASSES[name]
    doc = inspect.getdoc(cls) or ""
    missing = [field for field in sorted(public_fields(cls)) if not re.search(rf"\b{field}\b", doc)]
    assert not missing, f"{name}: {', '.join(missing)}"


@pytest.mark.parametrize("name", DATACLASSES)
def test_a_section_of_a_public_dataclass_names_fields_that_exist(name: str) -> None:
    """The names must also be in the order of the fields."""
    cls = DATACLASSES[name]
    names = described(inspect.getdoc(cls) or "")
    unknown = [each for each in names if each not in public_fields(cls) and not hasattr(cls, each)]
    assert not unknown, f"{name}: {', '.join(unknown)}"
    inherited = {field for base in cls.__mro__[1:] if dataclasses.is_dataclass(base) for field in public_fields(base)}
    fields = [field.name for field in dataclasses.fields(cls) if field.name in names]
    fields.sort(key=lambda field: field in inherited)  # inherited fields come last
    assert [each for each in names if each in fields] == fields


@pytest.mark.parametrize(
    "cls", [af.PPOConfig, af.TrainConfig, af.Sampling, af.Budget, af.Agent], ids=lambda cls: cls.__name__
)
def test_every_setting_is_described(cls: Any) -> None:
    doc = inspect.getdoc(cls) or ""
    assert set(described(doc)) == public_fields(cls)
    bare = re.findall(r"^ {4}(\w+)$", doc, re.MULTILINE)
    assert not bare, f"{', '.join(bare)}: say what it means, its unit, and what None means"

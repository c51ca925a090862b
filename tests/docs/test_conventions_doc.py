"""Evaluate the worked examples of docs/conventions.md and compare its table of stop reasons with the code.

Each section between the two markers has a block of statements and a table of calls. Write the computed results into
the tables:

    python tests/docs/test_conventions_doc.py --write
"""

import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

import agentfly_kit as af
from agentfly_kit.trajectories import TRUNCATED_STOPS, UNSCORED_STOPS, StopReason

PAGE = Path(__file__).resolve().parents[2] / "docs" / "conventions.md"
BEGIN, END = "<!-- generated: begin -->", "<!-- generated: end -->"
BLOCK = re.compile(r"^```python\n(?P<given>.*?)^```$", re.DOTALL | re.MULTILINE)
CALL = re.compile(
    r"^(?P<choice>\| [^`]+ \| `(?P<code>[^`]+)` \| )(?P<result>.*?)(?P<shown>(?: \([a-z].*\))? \|)$", re.M
)


def mass(mask: Tensor, how: Any, **options: Any) -> Tensor:
    """Return the weight of one token of each row."""
    x = torch.ones(mask.shape, requires_grad=True)
    (g,) = torch.autograd.grad(af.losses.aggregate(x, mask, how, **options), x)
    return g.max(1).values


def both(f: Any, p: Tensor, q: Tensor, third: Any) -> str:
    p = p.clone().requires_grad_()
    value = f(p, q, third)
    (g,) = torch.autograd.grad(value.sum(), p)
    return f"value {number(value.detach())}, gradient {number(g)}"


def number(x: Any) -> str:
    if isinstance(x, str):
        return x
    if isinstance(x, Tensor) and x.ndim:
        return "[" + ", ".join(number(v) for v in x) + "]"
    text = f"{float(x):.4f}".rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text


def computed(sections: list[str]) -> list[str]:
    """Return the sections with the result of every call in their tables."""
    done = []
    for section in sections:
        names: dict[str, Any] = {
            "af": SimpleNamespace(advantages=af.advantages, losses=af.losses), "torch": torch, "mass": mass,
            "both": both,
        }  # fmt: skip
        (given,) = BLOCK.finditer(section)
        exec(given["given"], names)
        done.append(CALL.sub(lambda m, n=names: m["choice"] + number(eval(m["code"], n)) + m["shown"], section))
    return done


def parts() -> tuple[str, list[str], str]:
    """Return the text before the worked examples, their sections, and the text after them."""
    text = PAGE.read_text(encoding="utf-8")
    assert text.count(BEGIN) == text.count(END) == 1, f"{PAGE.name} needs each of {BEGIN} and {END} once"
    before, rest = text.split(BEGIN)
    middle, after = rest.split(END)
    head, *sections = re.split(r"(?m)^(?=### )", middle)
    return before + BEGIN + head, sections, END + after


@pytest.mark.filterwarnings("ignore:aggregate. rows without action tokens:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:kl.kind='k1'. in a loss:UserWarning")
def test_the_worked_numbers_are_what_the_code_gives() -> None:
    sections = parts()[1]
    for section in sections:
        rows = len(re.findall(r"(?m)^\| (?!choice)", section))
        assert rows == len(CALL.findall(section)) >= 2, f"not every row has a choice, a call and a result: {section}"
    assert len(sections) >= 19 and len(CALL.findall("".join(sections))) >= 48, "sections were not found"
    assert sections == computed(sections), "out of date; run: python tests/docs/test_conventions_doc.py --write"


def test_the_table_of_stop_reasons_is_that_of_the_code() -> None:
    rows = [line.strip("| ").split("|") for line in parts()[0].splitlines() if line.startswith("| `")]
    table = {cells[0].strip().strip("`"): [c.strip() for c in cells[1:4]] for cells in rows}
    assert sorted(table) == sorted(get_args(StopReason))
    for reason, (scored, terminal, truncated) in table.items():
        assert scored == ("no" if reason in UNSCORED_STOPS else "yes"), reason
        assert truncated == ("yes" if reason in TRUNCATED_STOPS else "no"), reason
        assert terminal == ("yes" if reason not in TRUNCATED_STOPS | UNSCORED_STOPS else "no"), reason


def test_the_hand_written_headings_are_there() -> None:
    before = parts()[0]
    for heading in ("Tokens and rows", "Seeds", "Rewards and truncation", "Stop reasons"):
        assert f"\n## {heading}\n" in before


def test_numbers_are_written_plainly() -> None:
    assert number(torch.tensor([0.5, -0.0, 1 / 3, -2.0])) == "[0.5, 0, 0.3333, -2]"
    assert number(math.sqrt(0.5)) == "0.7071"


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        raise SystemExit("usage: python tests/docs/test_conventions_doc.py --write")
    import warnings

    warnings.simplefilter("ignore")
    before, sections, after = parts()
    PAGE.write_text(before + "".join(computed(sections)) + after, encoding="utf-8")

"""docs/environments.md contains the table of `af.envs.list()`, and its links are valid."""

import re
from typing import Any

import pytest
from paths import ROOT

import agentfly_kit as af

DOCS = ROOT / "docs"


def table() -> dict[str, str]:
    def row(name: str, of: Any) -> str:
        needs = "nothing" if of["needs"] == "nothing" else f"{of['needs']}: `{getattr(af.envs, name).family.install}`"
        cells = [f"`{name}`", of["what"], of["tools"], needs, of["size"], of["licence"]]
        return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"

    return {str(name): row(str(name), of) for name, of in af.envs.list().iterrows()}


def test_the_table_is_that_of_the_list() -> None:
    text = (DOCS / "environments.md").read_text()
    wanted = table()
    print(
        "\n".join(
            ["| family | what | tools | needs | tasks | licence |", "|---|---|---|---|---|---|", *wanted.values()]
        )
    )
    found = dict(re.findall(r"^(?=\| `(\w+)` \|)(.*)$", text, re.MULTILINE))
    assert len(found) >= 12
    for name, row in found.items():
        assert row == wanted[name]


@pytest.mark.parametrize("page", ["environments.md", "learning.md"])
def test_links_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", (DOCS / page).read_text())
    assert links
    for link in links:
        assert (DOCS / link).is_file(), link

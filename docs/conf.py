"""Settings of the documentation site, built by `make docs`.

The source folder is the repository, so that links between README.md, docs/ and notebooks/ are the same here and in a
checkout. A link to a file that is not a page, such as a Python file, becomes a download.
"""

import json
from pathlib import Path
from typing import Any

import plotly
import plotly.io

import agentfly_kit

project, author, copyright = "agentfly_kit", "the agentfly_kit authors", "the agentfly_kit authors, Apache-2.0"
version = release = agentfly_kit.__version__
root_doc = "docs/index"
include_patterns = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs/**", "notebooks/*.ipynb"]
exclude_patterns = ["**/.ipynb_checkpoints", "docs/pypi.md"]

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
suppress_warnings = [
    "docutils",  # docstrings are Markdown-like plain text, not reStructuredText
    "myst.header",  # a notebook may start below a first-level heading
]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
default_role = "code"
smartquotes = False  # "calculator" is a string

nb_execution_mode = "off"  # notebooks are shown with their saved outputs
# Widgets need a kernel; their saved static HTML does not.
nb_mime_priority_overrides = [("html", "application/vnd.jupyter.widget-view+json", None)]

html_theme = "furo"
html_static_path = [str(Path(plotly.__file__).parent / "package_data" / "plotly.min.js")]
html_title = f"agentfly_kit {version}"
html_copy_source = False
html_show_sphinx = False


def _draw_figures(app: Any, name: str, source: list[str]) -> None:
    """Replace saved plotly figures, which only JupyterLab draws, by HTML that draws them with plotly.js."""
    if not name.startswith("notebooks/"):
        return
    notebook, figures = json.loads(source[0]), 0
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            if figure := output.get("data", {}).pop("application/vnd.plotly.v1+json", None):
                output["data"]["text/html"] = plotly.io.to_html(
                    figure,
                    config={"responsive": True},
                    include_plotlyjs="../_static/plotly.min.js" if figures == 0 else False,  # once per page
                    full_html=False,
                    div_id=f"figure-{figures}",
                )
                figures += 1
    source[0] = json.dumps(notebook)


def _redirect(app: Any, exception: Exception | None) -> None:
    """Write an index.html at the top of the site, whose pages are in the folders of the repository."""
    if exception is None and app.builder.format == "html":
        page = (
            '<!doctype html><meta http-equiv="refresh" content="0; url=docs/index.html"><title>agentfly_kit</title>'
        )
        (Path(app.outdir) / "index.html").write_text(page + "\n", encoding="utf-8")


def setup(app: Any) -> None:
    """Register the functions above."""
    app.connect("source-read", _draw_figures)
    app.connect("build-finished", _redirect)

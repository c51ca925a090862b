"""Saved notebooks: the pictures alone, for readers without a kernel. Runs no cell and needs no Jupyter."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ._base import WIDGET_MIME


def freeze(path: str | os.PathLike[str]) -> int:
    """Leave the pictures alone in a saved notebook: the number of outputs that were changed.

    JupyterLab prefers the live form of a view, and where its kernel is gone says "model not found" instead of showing
    the picture beside it. Where both are there, this takes the live form and the saved widget state out. A notebook
    that was trusted stays so. Save it first, and do it while it is closed: an open page would write its own form back.
    Raises:  FileNotFoundError; nbformat's own error for a file that is no notebook, which stays as it was.
    """
    import nbformat
    from nbformat.sign import NotebookNotary

    file = Path(path)
    notebook = nbformat.read(file, as_version=4)  # type: ignore[no-untyped-call]
    notary: Any = NotebookNotary()  # type: ignore[no-untyped-call]
    trusted = notary.check_signature(notebook)
    changed = 0
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if WIDGET_MIME in data and "text/html" in data:
                del data[WIDGET_MIME]
                changed += 1
    if changed:
        left = any(WIDGET_MIME in o.get("data", {}) for cell in notebook.cells for o in cell.get("outputs", ()))
        if not left:
            notebook.metadata.pop("widgets", None)
        spare = file.with_name(f".{file.name}.part")
        nbformat.write(notebook, spare)  # type: ignore[no-untyped-call]
        os.replace(spare, file)
        if trusted:
            notary.sign(notebook)
    return changed

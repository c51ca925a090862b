"""Static pictures in saved notebooks, for readers without a kernel. Runs no cell and needs no Jupyter."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ._base import WIDGET_MIME


def freeze(path: str | os.PathLike[str]) -> int:
    """Keep only the static pictures of the views in a saved notebook. Return the number of outputs changed.

    JupyterLab prefers the live form of a view; without its kernel it shows "model not found" instead of the picture
    stored beside it. This function removes the live form, where there is a picture too, and the saved widget state. A
    trusted notebook stays trusted. Save and close the notebook first, because an open page would write its own version
    back.

    Raises:  FileNotFoundError; nbformat's error for a file that is not a notebook, which is left unchanged.
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

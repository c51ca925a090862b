"""Static pictures of views in saved notebooks, for readers without a kernel."""

from __future__ import annotations

import os
import sys
import weakref
from pathlib import Path
from typing import Any

WIDGET_MIME = "application/vnd.jupyter.widget-view+json"

# Displayed views, whose pictures are updated after each cell.
_displayed: weakref.WeakSet[Any] = weakref.WeakSet()
_shells: weakref.WeakSet[Any] = weakref.WeakSet()


def update_after_each_cell(view: Any) -> None:
    """Call `view._update_picture()` after each cell for as long as the view exists."""
    _displayed.add(view)
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is not None and shell not in _shells:
        _shells.add(shell)
        shell.events.register("post_run_cell", _after_cell)


def _after_cell(*_: Any) -> None:
    for view in list(_displayed):
        try:
            view._update_picture()
        except Exception as error:
            view._failed(error)


def freeze(path: str | os.PathLike[str]) -> int:
    """Keep only the static pictures of the views in a saved notebook. Return the number of outputs changed.

    JupyterLab and Notebook 7 save views as pictures by themselves. Notebooks that were executed without a browser
    (`jupyter nbconvert --execute`) or saved by another front end also hold the live form, which JupyterLab prefers:
    without a kernel, JupyterLab then shows "model not found" instead of the picture. This function removes the saved
    widget state, and the live form of every output that has a picture. A trusted notebook stays trusted. Save and close
    the notebook first, because an open page would overwrite the file.

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
                output.get("metadata", {}).pop("agentfly_kit", None)  # the view with this id no longer exists
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

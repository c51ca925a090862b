"""Static pictures of views in saved notebooks, for readers without a kernel."""

from __future__ import annotations

import os
import sys
import weakref
from pathlib import Path
from typing import Any

WIDGET_MIME = "application/vnd.jupyter.widget-view+json"

# Views that are updated after each cell.
_updated: weakref.WeakSet[Any] = weakref.WeakSet()
_shells: weakref.WeakSet[Any] = weakref.WeakSet()


def update_after_each_cell(view: Any) -> None:
    """Call `view._after_cell()` and `view._update_picture()` after each cell for as long as the view exists."""
    _updated.add(view)
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is not None and shell not in _shells:
        _shells.add(shell)
        shell.events.register("post_run_cell", _after_cell)


def _after_cell(*_: Any) -> None:
    cell, run = current_cell()
    for view in list(_updated):
        view._after_cell()
        view._update_picture()
        if cell:
            view._forget_runs_before(cell, run)


def _request() -> dict[str, Any]:
    """Return the message that requested the current cell's execution, or {} outside a kernel."""
    ipython = sys.modules.get("IPython")
    kernel = getattr(ipython and ipython.get_ipython(), "kernel", None)
    return {} if kernel is None else kernel.get_parent("shell") or {}


def current_cell() -> tuple[str, str]:
    """Return the current cell's id ("" if the program that runs the cell sends none) and the id of this execution."""
    request = _request()
    return request.get("metadata", {}).get("cellId", ""), request.get("header", {}).get("msg_id", "")


def forget_output(view: Any) -> None:
    """Remove a view from IPython's `Out`, which keeps every displayed object alive."""
    shell = sys.modules["IPython"].get_ipython()
    for number in [number for number, value in shell.user_ns["_oh"].items() if value is view]:
        del shell.user_ns["_oh"][number]
        shell.del_var(f"_{number}", by_name=True)


def is_headless() -> bool:
    """Return True if the current cell is run by a program without a page, such as nbclient, nbconvert or papermill.

    Such a program neither answers `input()` nor sends metadata about the cell, whereas a notebook page does at least
    one of these. Voilà runs cells like nbclient but then shows a live page, so the function returns False.
    """
    request = _request()
    return (
        not os.environ.get("SERVER_SOFTWARE", "").startswith("voila")
        and request.get("content", {}).get("allow_stdin") is False
        and not request.get("metadata")
    )


def freeze(path: str | os.PathLike[str]) -> int:
    """Keep only the static pictures of the views in a saved notebook. Return the number of outputs changed.

    Notebooks that were saved in JupyterLab or Notebook 7, or executed without a page (`jupyter nbconvert --execute`),
    already contain only pictures. Notebooks saved by another front end or with version 0.1 of this package also contain
    the live form, which JupyterLab prefers; without a kernel, it shows "model not found" instead of the picture.
    This function removes the saved widget state, and the live form of every output that has a picture. A trusted
    notebook stays trusted. Save and close the notebook first, because an open page would overwrite the file.

    Raises:
        FileNotFoundError: If the file does not exist.
        OSError: If the folder cannot be written to. The file is unchanged.
        nbformat.reader.NotJSONError, nbformat.ValidationError: If the file is not a notebook.
    """
    import nbformat
    from nbformat.sign import NotebookNotary

    file = Path(path)
    notebook = nbformat.read(file, as_version=4)
    notary: Any = NotebookNotary()
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
        outputs = (output for cell in notebook.cells for output in cell.get("outputs", ()))
        if not any(WIDGET_MIME in output.get("data", {}) for output in outputs):
            notebook.metadata.pop("widgets", None)
        spare = file.with_name(f".{file.name}.part")
        try:
            nbformat.write(notebook, spare)
            os.replace(spare, file)
        except OSError as error:
            spare.unlink(missing_ok=True)
            error.add_note(f"{file} is unchanged; copy it to a writable folder")
            raise
        if trusted:
            notary.sign(notebook)
    return changed

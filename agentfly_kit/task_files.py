"""Reading task rows from files and the Hugging Face Hub, with the location of each row for error messages."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from agentfly_kit.errors import TaskError
from agentfly_kit.types import drop_none

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
# Columns that contain the question unless `question=` names another one.
QUESTIONS = ("messages", "question", "prompt", "input")
FILES = ".jsonl, .json, .csv or .parquet file"


def is_hub_id(text: str) -> bool:
    """Return True if `text` has the form of a Hugging Face Hub id, such as "openai/gsm8k"."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", text) is not None and not text.endswith(SUFFIXES)


def hub_rows(id: str, config: str | None, split: str | None) -> Iterator[tuple[str, Any]]:
    """Load a dataset from the Hugging Face Hub. Return (location, row) for each row in `split`, or in all splits."""
    other = f"; to load a file, pass its path, such as './{id}.jsonl'"
    try:
        from datasets import load_dataset
    except ModuleNotFoundError:
        raise TaskError(
            f'{id!r} is not a folder; to use the Hugging Face hub, run: pip install "agentfly_kit[trl]"{other}'
        ) from None
    try:
        rows = load_dataset(id, config, split=split)
    except Exception as error:  # for example no network, or an unknown dataset, configuration or split
        raise TaskError(
            f"{id!r} is not a folder and could not be loaded from the Hugging Face hub ({type(error).__name__}: "
            f"{error}){other}"
        ) from error
    return locate_rows(rows if split is None else {split: rows}, id)


def bundled_folder() -> Any:
    """Return the folder of bundled task sets, which is `_data` in an installed package and `data` in a checkout."""
    from importlib import resources

    try:
        return resources.files("agentfly_kit._data")
    except ModuleNotFoundError:
        return Path(__file__).resolve().parent.parent / "data"


def bundled_json(*path: str) -> Any:
    """Read a bundled JSON file. `path` contains the parts of its path, such as "vocabularies" and "alfworld.json"."""
    return json.loads(bundled_folder().joinpath(*path).read_text(encoding="utf-8"))


def bundled_names() -> list[str]:
    """Return the names of the bundled task sets."""
    root = bundled_folder()
    # A bundled folder is a task set only if it contains train.jsonl.
    return sorted(d.name for d in root.iterdir() if d.joinpath("train.jsonl").is_file()) if root.is_dir() else []


def list_of_bundled() -> str:
    """Return the names of the bundled task sets as a comma-separated list for error messages."""
    return ", ".join(map(repr, bundled_names())) or "(no task sets are installed)"


def read_rows(file: Any) -> Iterator[tuple[str, Any]]:
    """Yield (location, row) for each row of a file. All files but .jsonl files are read into memory as a whole."""
    if not file.name.endswith(SUFFIXES):
        raise TaskError(f"{file.name} must be a {FILES}")
    if file.name.endswith(".parquet"):
        import pyarrow.parquet as parquet

        try:
            with file.open("rb") as stream:
                rows = parquet.read_table(stream).to_pylist()
        except Exception as error:
            raise TaskError(f"{file.name} is not a readable parquet file ({error})") from None
        yield from locate_rows(map(_arrow_row, rows), file.name)
    elif file.name.endswith(".csv"):
        yield from locate_rows(_read_csv(file), file.name)
    elif file.name.endswith(".json"):
        text = "".join(line for _, line in _read_lines(file))
        yield from locate_rows(_parse_json(text, file.name, 1) if text.strip() else [], file.name)
    else:
        for number, line in _read_lines(file):
            if line.strip():
                yield f"{file.name}:{number}", _parse_json(line.rstrip("\r\n"), file.name, number)


def _read_lines(file: Any) -> Iterator[tuple[int, str]]:
    """Yield numbered lines of a UTF-8 file. Only line feeds end a line, because JSON strings may contain U+2028."""
    with file.open("rb") as stream:
        for number, data in enumerate(stream, 1):
            try:
                yield number, data.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError:
                raise TaskError(f"{file.name}:{number}: not UTF-8; save the file as UTF-8") from None


def _parse_json(text: str, name: str, number: int) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        line = number + getattr(error, "lineno", 1) - 1
        raise TaskError(f"{name}:{line}: not JSON ({getattr(error, 'msg', error)})") from None


def _read_csv(file: Any) -> Any:
    import pandas

    limit = csv.field_size_limit(sys.maxsize)
    try:
        with file.open("rb") as stream:
            # Only the Python parser marks missing cells of short rows. The header is read as a row, because otherwise
            # pandas would rename repeated columns and use the first value of a long row as its index.
            cells = pandas.read_csv(
                stream, header=None, dtype=str, keep_default_na=False, encoding="utf-8-sig", engine="python"
            )
    except ValueError as error:  # includes UnicodeDecodeError
        raise TaskError(
            f"{file.name} is not a readable csv file ({error}); it must be UTF-8 and begin with a line of column "
            "names, and values with commas or line breaks must be in double quotes; for another encoding, use "
            "tasks_from(pandas.read_csv(path, encoding=...))"
        ) from None
    finally:
        csv.field_size_limit(limit)
    header, incomplete = list(cells.iloc[0]), cells.isna().any(axis=1).to_numpy()
    if incomplete.any():
        raise TaskError(
            f"{file.name}, row {incomplete.argmax() - 1}: all rows must have as many values as the header; put "
            "values that contain commas or line breaks in double quotes"
        )
    if len({*header}) < len(header) or not all(header):
        raise TaskError(f"{file.name}: column names must be unique and not empty, got {', '.join(header)!r}")
    return cells[1:].set_axis(header, axis=1)


def locate_rows(rows: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield (location, row) for each row of a collection, or of a mapping from split names to collections."""
    if isinstance(rows, Mapping):
        for column in rows.keys() & set(QUESTIONS):
            if isinstance(rows[column], list) and not any(isinstance(row, Mapping) for row in rows[column]):
                raise TaskError(
                    f"{name}: rows must not be a dict of columns, got the column {column!r}; pass "
                    "pandas.DataFrame(rows), or a list with one dict per row"
                )
        for split, part in rows.items():
            for i, row in enumerate(_iterable_rows(part, name)):
                yield f"{name}, {split} row {i}", with_split(row, str(split))
    else:
        for i, row in enumerate(_iterable_rows(rows, name)):
            yield f"{name}, row {i}", row


def with_split(row: Any, split: str) -> Any:
    """Add the column "split" to a row that does not have it."""
    return {"split": split, **row} if isinstance(row, Mapping) else row


def _iterable_rows(rows: Any, name: str) -> Iterable[Any]:
    if hasattr(rows, "notna"):  # a DataFrame; missing values (NaN, NaT, NA) become None
        rows = rows.astype(object).where(rows.notna(), None).to_dict("records")
    if hasattr(rows, "features"):  # a Dataset
        return map(_arrow_row, rows)
    if isinstance(rows, str | bytes) or not isinstance(rows, Iterable):
        raise TaskError(
            f"{name}: rows must be a list of dicts, a DataFrame or a Dataset, or a dict from split names to such rows, "
            f"got {rows!r:.60}; for a file use load_tasks(path)"
        )
    return rows


def _arrow_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Remove None from nested dicts of a row, because Arrow adds all keys of a nested dict to the dicts of all rows."""
    return {name: drop_none(to_python(value)) for name, value in row.items()}


def to_python(value: Any) -> Any:
    """Convert NumPy arrays and scalars, including those in lists and dicts, to Python lists and numbers."""
    if type(value).__module__ == "numpy":
        return to_python(value.tolist())
    if isinstance(value, dict):
        return {key: to_python(part) for key, part in value.items()}
    return [to_python(part) for part in value] if isinstance(value, list | tuple) else value

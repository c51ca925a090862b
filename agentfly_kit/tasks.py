"""Collections of tasks, loaded from files, data frames or lists, with disjoint splits.

Each row becomes one task. A row has the column `messages` (or a string in `question`, `prompt` or `input`) and,
optionally, `id` and `split`. All other columns become task fields, which rewards and tools can request by name. If the
question or the answer is in a column with another name, pass `question=` or `answer=`.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, overload

from agentfly_kit import task_files
from agentfly_kit._display import Displayable
from agentfly_kit.errors import TaskError
from agentfly_kit.seeds import digest
from agentfly_kit.types import Task, drop_none, grouped, normalize_messages, text_of


class Tasks(Displayable, Sequence[Task]):
    """Immutable sequence of tasks, each of which may belong to a split. Slices and splits are also `Tasks`.

    Args:
        tasks: the tasks, with unique ids.
        splits: name of the split of each task, or None for tasks without a split.
        name: name used in error messages and `repr`.

    Raises:
        TaskError: if two tasks have the same id, or if tasks in different splits have the same content.
    """

    def __init__(
        self, tasks: Iterable[Task], splits: Iterable[str | None] | None = None, name: str = "tasks"
    ) -> None:
        self._tasks = tuple(tasks)
        self._splits = tuple(splits) if splits is not None else (None,) * len(self._tasks)
        self.name = name
        for id, count in Counter(task.id for task in self._tasks).items():
            if count > 1:
                raise TaskError(f"{name}: ids must be unique, got {id!r} for {count} tasks")
        if len(set(self._splits)) > 1:
            _check_disjoint(self, name)

    @property
    def splits(self) -> dict[str, int]:
        """Number of tasks in each split, keyed by name."""
        return dict(Counter(split for split in self._splits if split is not None))

    @property
    def split_names(self) -> dict[str, str]:
        """Name of the split of each task that belongs to one, keyed by task id."""
        pairs = zip(self._tasks, self._splits, strict=True)
        return {task.id: split for task, split in pairs if split is not None}

    def split(self, name: str) -> Tasks:
        """Return the tasks of one split.

        Raises:
            TaskError: if there is no such split.
        """
        found = [task for task, split in zip(self._tasks, self._splits, strict=True) if split == name]
        if not found:
            raise TaskError(
                f"{self.name} must have the split {name!r}, got the splits "
                f"{', '.join(map(repr, self.splits)) or 'none'}; add a 'split' column to the rows, or use "
                "tasks_from(rows, test=0.1)"
            )
        return Tasks(found, [name] * len(found), self.name)

    @property
    def train(self) -> Tasks:
        """The tasks of the split "train", or all tasks if there are no splits."""
        return self if not self.splits else self.split("train")

    @property
    def test(self) -> Tasks:
        """The tasks of the split "test".

        Raises:
            TaskError: if there is no such split, because evaluation on training tasks would be misleading.
        """
        return self.split("test")

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of all task fields, in order of first occurrence."""
        return tuple(dict.fromkeys(name for task in self._tasks for name in task.fields))

    @property
    def fingerprint(self) -> str:
        """Hash of the ids, contents and splits of all tasks."""
        rows = zip(self._tasks, self._splits, strict=True)
        return digest(*(f"{task.id} {split} {_canonical_content(task)}" for task, split in rows), size=6)

    def sample(self, n: int, seed: int = 0) -> Tasks:
        """Draw `n` tasks without replacement. The result is deterministic for a given seed."""
        return self._take(random.Random(seed).sample(range(len(self)), n))

    def _take(self, indices: Iterable[int]) -> Tasks:
        chosen = list(indices)
        return Tasks([self._tasks[i] for i in chosen], [self._splits[i] for i in chosen], self.name)

    @overload
    def __getitem__(self, key: int) -> Task: ...
    @overload
    def __getitem__(self, key: slice) -> Tasks: ...
    def __getitem__(self, key: int | slice) -> Task | Tasks:
        return self._take(range(len(self))[key]) if isinstance(key, slice) else self._tasks[key]

    def __len__(self) -> int:
        return len(self._tasks)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tasks):
            return NotImplemented
        return (self._tasks, self._splits) == (other._tasks, other._splits)

    def __hash__(self) -> int:
        return hash(tuple(task.id for task in self._tasks))

    def __repr__(self) -> str:
        splits = ", ".join(f"{n} {name}" for name, n in self.splits.items())
        count = f"{len(self)} ({splits})" if splits else str(len(self))
        return f"Tasks({self.name}: {count}; fields: {', '.join(self.fields) or 'none'})"


# --- tasks from files ----------------------------------------------------------------------------


def load_tasks(
    name_or_path: str | Path,
    *,
    question: str | None = None,
    answer: str | None = None,
    split: str | None = None,
    config: str | None = None,
    drop_answer: bool = False,
) -> Tasks:
    """Load a bundled task set by name, a file or folder by path, or a dataset by its Hugging Face Hub id.

    Args:
        name_or_path: One of

            - the name of a bundled task set, such as "calculator";
            - the path of a .jsonl file, a .csv file (UTF-8, with a header; all values are text), a .parquet file, a
              .json file (a list of rows, or {"train": [...], "test": [...]}), or a folder with one such file per split
              (train.jsonl, test.jsonl). To load a folder with the name of a bundled task set, write "./calculator";
            - a Hub id such as "openai/gsm8k", unless a folder with this path exists. Requires the package `datasets`,
              which is installed with `agentfly_kit[trl]`.
        question: see `tasks_from`.
        answer: see `tasks_from`.
        split: name of the split to load; all splits by default.
        config: configuration name of a Hub dataset, such as "main".
        drop_answer: see `tasks_from`.

    Raises:
        TaskError: if the tasks cannot be loaded; the message names the file and line.
    """
    columns = _Columns(question, answer, drop_answer)
    text = str(name_or_path)
    path = Path(name_or_path).expanduser()
    # A local folder has precedence over a Hub dataset with the same name.
    if isinstance(name_or_path, str) and task_files.is_hub_id(text) and not path.exists():
        return _build_tasks(task_files.hub_rows(text, config, split), text, columns)
    if config is not None:
        raise TaskError(f"config applies only to datasets of the Hugging Face Hub, got {config!r} for {text!r}")
    # A name without a separator or suffix is never a path, so that a folder cannot hide a bundled task set.
    if (
        isinstance(name_or_path, str)
        and "/" not in text
        and "\\" not in text
        and not text.endswith(task_files.SUFFIXES)
    ):
        if text not in task_files.bundled_names():
            raise TaskError(
                f"a task set must be one of {task_files.list_of_bundled()}, got {text!r}. To load a file, pass its "
                f"path: load_tasks('./{text}.jsonl')"
            )
        path = task_files.bundled_folder() / text
    if path.is_file():
        tasks = _build_tasks(task_files.read_rows(path), path.name, columns)
    elif not path.is_dir():
        raise TaskError(
            f"{path}: no such file; pass a {task_files.FILES}, or one of the task sets {task_files.list_of_bundled()}"
        )
    else:
        files = [file for file in path.iterdir() if file.name.endswith(task_files.SUFFIXES)]
        if not files:
            raise TaskError(f"{path} must contain a {task_files.FILES}, got none")
        # Put the training tasks first and sort the rest by name, so that the order does not depend on the file system.
        files.sort(key=lambda file: (not file.name.startswith("train."), file.name))
        rows = (
            (location, task_files.with_split(row, file.name.rpartition(".")[0]))
            for file in files
            for location, row in task_files.read_rows(file)
        )
        tasks = _build_tasks(rows, path.name, columns)
    return tasks if split is None else tasks.split(split)


# --- tasks from Python objects -------------------------------------------------------------------


def tasks_from(
    rows: Any,
    *,
    question: str | None = None,
    answer: str | None = None,
    test: float | None = None,
    drop_answer: bool = False,
    name: str = "tasks",
) -> Tasks:
    """Create tasks from rows in memory.

    Args:
        rows: a list of dicts, a DataFrame, a `datasets` Dataset or DatasetDict, or {"train": [...], "test": [...]}.
            For a Dataset or a .parquet file, keys of nested dicts whose value is None are removed.
        question: name of the column that contains the question (a string or messages); by default the first non-empty
            column of `messages`, `question`, `prompt` and `input`.
        answer: name of the column that becomes the field "answer".
        test: fraction of tasks to assign to the split "test". The selection depends only on the content of the tasks,
            not on their order or ids.
        drop_answer: whether to remove the last message if it is an assistant message, and store its text in the field
            "answer". By default, such rows are rejected, because the answer would be part of the prompt.
        name: name used in error messages and `repr`.

    Raises:
        TaskError: if a row is invalid.
    """
    tasks = _build_tasks(task_files.locate_rows(rows, name), name, _Columns(question, answer, drop_answer))
    if test is None:
        return tasks
    if isinstance(test, bool) or not 0 < test < 1:
        raise TaskError(f"test must be the fraction of tasks to hold out, between 0 and 1, got {test!r}")
    if tasks.splits:
        raise TaskError(
            f"test must be None for rows that already have splits ({', '.join(map(repr, tasks.splits))}), "
            f"got {test!r}"
        )
    return _held_out(tasks, test)


def _held_out(tasks: Tasks, share: float) -> Tasks:
    """Assign the tasks with the lowest content hashes to the split "test". Equal tasks stay in the same split."""
    by_content = grouped(range(len(tasks)), lambda i: digest("split", _canonical_content(tasks[i]), size=6))
    held: set[int] = set()
    want = min(max(1, round(share * len(tasks))), len(tasks) - 1)
    for key in sorted(by_content):
        if len(held) >= want:
            break
        held.update(by_content[key])
    if not held or len(held) == len(tasks):
        raise TaskError(
            f"test must leave distinct tasks for both splits, got {share} for {len(tasks)} tasks ({len(by_content)} "
            "distinct); add more tasks"
        )
    return Tasks(tasks, ["test" if i in held else "train" for i in range(len(tasks))], tasks.name)


# --- conversion of rows to tasks -----------------------------------------------------------------


@dataclass(frozen=True)
class _Columns:
    """Arguments of `tasks_from` that control how columns are used."""

    question: str | None = None
    answer: str | None = None
    drop_answer: bool = False

    def take_question(self, values: dict[str, Any], location: str) -> tuple[str, Any]:
        """Remove the question from the row `values` and return its column name and value. Rename the answer column."""
        have = ", ".join(map(repr, values)) or "none"
        for option, column in (("question", self.question), ("answer", self.answer)):
            if column is not None and column not in values:
                raise TaskError(f"{location}: {option}={column!r} must name a column, got columns: {have}")
        if self.answer not in (None, "answer") and "answer" in values:
            raise TaskError(
                f"{location}: with answer={self.answer!r}, no other column may be named 'answer', got columns: {have}"
            )
        column = self.question or next((c for c in task_files.QUESTIONS if not _is_empty(values.get(c))), None)
        column = column or next((c for c in task_files.QUESTIONS if c in values), None)
        if column is None:
            raise TaskError(
                f"{location}: a row must have a question in one of the columns {', '.join(task_files.QUESTIONS)}, got "
                f"columns: {', '.join(values) or 'none'}; name another column with question="
            )
        value = values.pop(column)
        if _is_empty(value):
            raise TaskError(
                f"{location}: the question in column {column!r} must not be empty; remove or fill the row"
            )
        if self.answer is not None:
            values["answer"] = values.pop(self.answer)
        return column, value


def _is_empty(value: Any) -> bool:
    return value in (None, []) or (isinstance(value, str) and not value.strip())


def _build_tasks(rows: Iterable[tuple[str, Any]], name: str, columns: _Columns) -> Tasks:
    tasks: list[Task] = []
    splits: list[str | None] = []
    repeats: Counter[str] = Counter()
    for location, row in rows:
        task, split, derived = _build_task(location, row, columns)
        if derived:
            # Rows with equal content become separate tasks, whose ids are made unique by a number.
            repeats[task.id] += 1
            if repeats[task.id] > 1:
                task = replace(task, id=f"{task.id}-{repeats[task.id]}")
        tasks.append(task)
        splits.append(split)
    if not tasks:
        raise TaskError(f"{name}: rows must contain at least one task, got none")
    return Tasks(tasks, splits, name)


def _build_task(location: str, row: Any, columns: _Columns) -> tuple[Task, str | None, bool]:
    """Convert a row to a task. Return the task, its split, and whether its id was derived from its content."""
    if isinstance(row, Task):
        return row, None, False
    if not isinstance(row, Mapping):
        raise TaskError(
            f"{location}: a row must be an object such as {{'question': ..., 'answer': ...}}, got {row!r:.60}"
        )
    values = {str(key): task_files.to_python(value) for key, value in row.items()}
    column, question = columns.take_question(values, location)
    id, split = values.pop("id", None), values.pop("split", None)
    if isinstance(question, str):
        if column == "messages":
            raise TaskError(
                f"{location}: 'messages' must be a list of messages, got a string; rename the column to 'question'"
            )
        question = [{"role": "user", "content": question}]
    if not isinstance(question, list):
        raise TaskError(f"{location}: {column!r} must be a string or a list of messages, got {question!r:.60}")
    # All messages in a Parquet file have the same keys. Remove keys whose value is None.
    question = [{k: v for k, v in m.items() if v is not None} if isinstance(m, dict) else m for m in question]
    where = f"{location}, {column!r}" if id is None else f"{location}, {column!r} of task {str(id)!r}"
    messages = normalize_messages(question, where, TaskError, answered=columns.drop_answer)
    if columns.drop_answer and messages[-1]["role"] == "assistant":
        last = messages[-1]
        answer = values.setdefault("answer", text_of(last))
        if answer != text_of(last) or last.get("tool_calls"):
            raise TaskError(
                f"{where}: with drop_answer=True, the last message must have no tool calls, and the column 'answer' "
                f"must be missing or equal to it, got the message {last!r:.80} and the answer {answer!r:.60}"
            )
        messages = normalize_messages(messages[:-1], where, TaskError)
    task = Task(location if id is None else str(id), messages, values)
    if id is None:
        task = replace(task, id=digest(_canonical_content(task), size=6))
    return task, split, id is None


# --- comparison of tasks by content --------------------------------------------------------------


def _check_disjoint(tasks: Tasks, name: str) -> None:
    first: dict[str, tuple[str, str | None]] = {}
    for task, split in zip(tasks, tasks._splits, strict=True):
        other_id, other_split = first.setdefault(_canonical_content(task), (task.id, split))
        if other_split != split:
            both = f"{other_id!r} ({other_split or 'no split'}) and {task.id!r} ({split or 'no split'})"
            raise TaskError(
                f"{name}: tasks {both} have the same messages and fields; remove one, because splits must be disjoint"
            )


def _canonical_content(task: Task) -> str:
    """Serialize the messages and fields of a task, without its id, to canonical JSON. None counts as missing."""
    try:
        return canonical_json(drop_none([task.messages, task.fields]))
    except TypeError as error:
        raise TaskError(f"task {task.id!r}: its fields cannot be compared with other tasks ({error})") from None


def canonical_json(value: Any) -> str:
    """Serialize a value to JSON that is the same in every process. Raise TypeError if it has no JSON form."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=_to_jsonable)


def _to_jsonable(value: Any) -> Any:
    from pydantic_core import to_jsonable_python

    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    try:
        return to_jsonable_python(value, bytes_mode="base64", inf_nan_mode="strings")
    except Exception:
        pass
    if isinstance(known := getattr(value, "digest", None), str):  # an `Image`
        return known
    if callable(dump := getattr(value, "tobytes", None)):  # arrays, and images of Pillow, which have a mode
        form = f"{value.mode} {value.size}" if hasattr(value, "mode") else ""
        return hashlib.blake2b(form.encode() + dump(), digest_size=16).hexdigest()
    raise TypeError(f"values must be strings, numbers, lists, dicts, bytes or arrays, got {type(value).__qualname__}")

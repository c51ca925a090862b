"""Tasks: loading, disjoint splits, and errors that name the file and line."""

import datetime
import json
import random
import re
import shutil
import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import errors
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import agentfly_kit as af
from agentfly_kit import task_files

USER, ANSWER = {"role": "user", "content": "2+3"}, {"role": "assistant", "content": "5"}
ROWS = [{"question": f"{i}+1", "answer": str(i + 1), "level": i % 3} for i in range(40)]


def write(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def contents(tasks: af.Tasks) -> set[str]:
    return {str(task.messages) + str(task.fields) for task in tasks}


# --- rows ----------------------------------------------------------------------------------------


def test_columns_of_text_and_of_messages() -> None:
    for column in ("question", "prompt", "input"):
        (task,) = af.tasks_from([{"id": "a", column: "2+3", "answer": "5"}])
        assert task == af.Task("a", ({"role": "user", "content": "2+3"},), {"answer": "5"})
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+3", "name": None}]
    for column in ("messages", "prompt"):
        (task,) = af.tasks_from([{column: messages}])
        assert task.messages == ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+3"})
    # Messages take precedence over a question.
    (task,) = af.tasks_from([{"question": "q", "messages": [{"role": "user", "content": "m"}], "input": "i"}])
    assert (task.messages[0]["content"], task.fields) == ("m", {"question": "q", "input": "i"})
    assert af.tasks_from([{"question": "q", "messages": None}])[0].messages[0]["content"] == "q"
    (task,) = af.tasks_from(
        [{"question": "q", "n": np.int64(3), "xs": np.array([1.5]), "d": {"a": [np.bool_(True)]}}]
    )
    assert task.fields == {"n": 3, "xs": [1.5], "d": {"a": [True]}} and type(task.fields["n"]) is int


def test_ids_are_derived_from_content() -> None:
    rows = [{"question": "a"}, {"question": "b"}, {"question": "a"}, {"question": "a", "answer": "1"}]
    first, second, again, answered = (task.id for task in af.tasks_from(rows))
    assert again == f"{first}-2" and len({first, second, answered}) == 3
    assert [af.tasks_from([row])[0].id for row in (rows[0], {"id": 7, "question": "a"})] == [first, "7"]
    # also from fields that JSON cannot represent
    odd = {"picture": b"\xff\x00", "day": datetime.date(2024, 2, 29), "tags": {"b", "a"}}
    one, two = af.tasks_from([{"question": "q", **odd}, {"question": "q", **odd, "picture": b"\xff\x01"}])
    assert one.id != two.id
    assert af.tasks_from([{"question": "q", **odd}])[0].id == one.id
    errors.check(
        lambda: af.tasks_from([{"question": "q", "x": object()}]),
        af.errors.TaskError,
        re.compile(r"its fields cannot be compared with other tasks \(values .*, got object"),
    )


ROW_ERRORS: list[tuple[Any, str]] = [
    ({"answer": "5"}, "a row must have a question in one of the columns messages, question, prompt, input"),
    ({"question": ""}, "the question in column 'question' must not be empty; remove or fill the row"),
    ({"question": 5}, "'question' must be a string or a list of messages, got 5"),
    ({"messages": "text"}, "'messages' must be a list of messages, got a string"),
    (["question"], "a row must be an object such as"),
]
MESSAGE_ERRORS: list[tuple[Any, str]] = [
    ([{"role": "user"}], "message 0 (role 'user'): 'content' must be"),
    (["text"], "message 0 must be a dict with 'role' and 'content'"),
    ([USER, ANSWER], "the last message must not be an assistant message"),
]


def test_errors_name_the_row() -> None:
    cases = [(row, f"rows, row 1: {words}") for row, words in ROW_ERRORS]
    cases += [({"messages": messages}, f"rows, row 1, 'messages': {words}") for messages, words in MESSAGE_ERRORS]
    for row, words in cases:
        errors.check(
            lambda: af.tasks_from([{"id": "first", "question": "ok"}, row], name="rows"), af.errors.TaskError, words
        )
    for rows in ("tasks.jsonl", 5, None):
        errors.check(
            lambda: af.tasks_from(rows), af.errors.TaskError, "tasks: rows must be a list of dicts, a DataFrame"
        )


def test_drop_answer_moves_the_last_answer_into_a_field(tmp_path: Path) -> None:
    rows = [{"messages": [USER, ANSWER]}, {"id": "b", "messages": [USER, ANSWER], "answer": "5"}, {"question": "1+1"}]
    tasks = af.tasks_from(rows, drop_answer=True)
    assert [task.messages[-1]["role"] for task in tasks] == ["user"] * 3
    assert [task.fields for task in tasks] == [{"answer": "5"}, {"answer": "5"}, {}]
    assert af.load_tasks(write(tmp_path / "a.jsonl", rows), drop_answer=True) == tasks
    assert tasks[0].id == af.tasks_from([{"question": "2+3", "answer": "5"}])[0].id
    call = {"function": {"name": "add", "arguments": "{}"}}
    other = "with drop_answer=True, the last message must have no tool calls, and"
    for row, words in (
        ({"messages": [USER, ANSWER], "answer": "6"}, other),
        ({"messages": [USER, {**ANSWER, "tool_calls": [call]}]}, other),
        (
            {"id": "c", "messages": [USER, ANSWER, ANSWER]},
            r"row 0, 'messages' of task 'c': the last message must not be .* drop_answer",
        ),
    ):
        errors.check(lambda: af.tasks_from([row], drop_answer=True), af.errors.TaskError, re.compile(words))


# --- files ---------------------------------------------------------------------------------------


def test_every_source_gives_the_same_tasks(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    datasets = pytest.importorskip("datasets")
    import pyarrow

    rows = [{**row, "messages": [{"role": "user", "content": row["question"]}]} for row in ROWS]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    pq.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    for path in (str(write(tmp_path / "a.jsonl", rows)), tmp_path / "a.json", tmp_path / "a.parquet"):
        assert af.load_tasks(path) == af.tasks_from(rows)
    frame = af.tasks_from(pd.DataFrame([*ROWS, {"question": "q", "level": 0}]))
    assert frame[:40] == af.tasks_from(ROWS)[:40]
    assert frame[40].fields == {"answer": None, "level": 0}  # a missing cell is None
    assert frame[40].id == af.tasks_from([{"question": "q", "level": 0}])[0].id
    whole = datasets.Dataset.from_list(ROWS)
    assert af.tasks_from(whole) == af.tasks_from(ROWS)
    parts = datasets.DatasetDict(train=whole.select(range(30)), test=whole.select(range(30, 40)))
    assert af.tasks_from(parts).splits == {"train": 30, "test": 10}
    # A byte order mark, other line ends, and U+2028 within a string.
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"question": "a\xe2\x80\xa8b"}\r\n{"question": "c"}')
    assert [t.messages[0]["content"] for t in af.load_tasks(tmp_path / "a.jsonl")] == ["a\u2028b", "c"]


def test_keys_that_a_table_added_to_nested_dicts_are_removed(tmp_path: Path) -> None:
    """Arrow gives each dict of a column the keys of all. Those that a row does not have are None, at every depth.

    None in dicts, JSON or a DataFrame is a value of its own, and stays.
    """
    pyarrow, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    datasets = pytest.importorskip("datasets")

    def row(arguments: dict[str, Any], **meta: Any) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        return {"prompt": [USER, {**ANSWER, "tool_calls": [call]}, USER], "meta": meta}

    rows = [row({"x": "s"}, a={"b": "s"}), row({"y": "t"}, a={"c": [{"d": "s"}, {"e": [None, "t"]}]})]
    want = af.tasks_from(rows)
    pq.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert af.tasks_from(datasets.Dataset.from_list(rows)) == af.tasks_from(pd.DataFrame(rows)) == want
    assert af.load_tasks(tmp_path / "a.parquet") == want
    rows = [row({"x": None}, a={"b": None})]
    for (task,) in (af.tasks_from(rows), af.tasks_from(pd.DataFrame(rows))):
        assert task.fields["meta"] == {"a": {"b": None}}
        assert task.messages[1]["tool_calls"][0]["function"]["arguments"] == {"x": None}


def test_a_json_file_of_splits_and_a_folder_of_files(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"train": ROWS[:30], "test": ROWS[30:]}))
    write(tmp_path / "sets" / "train.jsonl", ROWS[:30])
    write(tmp_path / "sets" / "test.jsonl", ROWS[30:])
    for tasks in (af.load_tasks(tmp_path / "a.json"), af.load_tasks(tmp_path / "sets")):
        assert tasks.splits == {"train": 30, "test": 10}
        assert contents(tasks) == contents(af.tasks_from(ROWS))
    assert [t.messages for t in af.load_tasks(tmp_path / "sets")] == [
        t.messages for t in af.tasks_from(ROWS)
    ]  # train first


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"question": "a"}\n\n{"question": "b"\n', "bad.jsonl:3: not JSON"),
        ('{"question": "a"}\n[1]\n', "bad.jsonl:2: a row must be an object"),
        ('{"question": "a"}\n{"answer": "b"}\n', "bad.jsonl:2: a row must have a question"),
        (
            '{"id":"x","question": "a"}\n\n{"id":"x","question":"b"}\n',
            "bad.jsonl: ids must be unique, got 'x' for 2 tasks",
        ),
        (b'{"question": "a"}\n\xff\n', "bad.jsonl:2: not UTF-8"),
        ("[" * 100_000, "bad.jsonl:1: not JSON"),
        ('[{"question": "a"},\n oops]', "bad.json:2: not JSON"),
        (
            '{"question": "a"}',
            "one.json: rows must be a list of dicts, a DataFrame or a Dataset, or a dict from split names "
            "to such rows, got 'a'",
        ),
        (b"PAR", "bad.parquet is not a readable parquet file"),
        ("", "bad.csv is not a readable csv file (No columns to parse"),
        (
            "problem,answer\na,b\n",
            "bad.csv, row 0: a row must have a question in one of the columns messages, question, prompt, "
            "input, got columns: problem, answer; name another column with question=",
        ),
        ("question,answer\na,b\nc\n", "bad.csv, row 1: all rows must have as many values as the header"),
        ("question,answer\na,b,c\nd,e\n", "bad.csv is not a readable csv file (Expected 2 fields in line 2, saw 3"),
        ("question,answer\na,b\nd,e,f\n", "bad.csv is not a readable csv file (Expected 2 fields in line 3, saw 3"),
        ("question,question\na,b\n", "bad.csv: column names must be unique and not empty, got 'question, question'"),
        ('question\na\n"b\n', "bad.csv is not a readable csv file (unexpected end of data"),
        (
            "question\né\n".encode("latin-1"),
            "bad.csv is not a readable csv file ('utf-8' codec can't decode byte 0xe9",
        ),
        ("question\n".encode("utf-16"), "bad.csv is not a readable csv file ('utf-8' codec can't decode byte 0xff"),
    ],
)
def test_errors_name_the_line(tmp_path: Path, text: str | bytes, words: str) -> None:
    name = re.match(r"\w+\.\w+", words)
    file = tmp_path / (name[0] if name else "bad.csv")
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    errors.check(lambda: af.load_tasks(file), af.errors.TaskError, words)


def test_paths_and_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = tmp_path / "shipped"
    write(shipped / "sums" / "train.jsonl", ROWS[:30])
    write(shipped / "sums" / "test.jsonl", ROWS[30:])
    write(shipped / "chess" / "train.jsonl", ROWS[:3])
    (shipped / "policy").mkdir()
    monkeypatch.setattr(task_files, "bundled_folder", lambda: shipped)
    monkeypatch.chdir(tmp_path)
    assert repr(af.load_tasks("sums")) == "Tasks(sums: 40 (30 train, 10 test); fields: answer, level)"
    errors.check(
        lambda: af.load_tasks("policy"),
        af.errors.TaskError,
        re.compile(
            r"^a task set must be one of 'chess', 'sums', got 'policy'\. To load a file, pass its path: "
            r"load_tasks\('\./policy\.jsonl'\)$"
        ),
    )
    shutil.copytree(shipped / "chess", tmp_path / "sums")
    assert [len(af.load_tasks(name)) for name in ("sums", "./sums")] == [
        40,
        3,
    ]  # a bare name never refers to a folder
    for path, words in (
        ("none.jsonl", "none.jsonl: no such file; pass a .jsonl, .* or .parquet file, or one of the task sets 'ch"),
        (write(tmp_path / "a.txt", []), "a.txt must be a .jsonl, .json, .csv or .parquet file"),
        (shipped / "policy", "must contain a .jsonl, .json, .csv or .parquet file, got none"),
    ):
        errors.check(lambda: af.load_tasks(path), af.errors.TaskError, re.compile(words))


def test_columns_with_other_names(tmp_path: Path) -> None:
    rows = [{"problem": "2+3", "solution": "5", "level": 1}, {"problem": "1+1", "solution": "2", "level": 2}]
    tasks = af.tasks_from(rows, question="problem", answer="solution")
    assert (tasks[0].messages[0]["content"], tasks[0].fields) == ("2+3", {"level": 1, "answer": "5"})
    assert af.tasks_from([{"question": "short", "prompt": "long"}], question="prompt")[0].fields == {
        "question": "short"
    }
    assert af.tasks_from([{"turns": [USER]}], question="turns")[0].messages == (USER,)
    frame = pd.DataFrame(rows)
    assert af.tasks_from(frame, question="problem", answer="solution") == tasks
    assert af.load_tasks(write(tmp_path / "a.jsonl", rows), question="problem", answer="solution") == tasks
    twice = [{"question": "a", "gold": "b", "answer": "c"}]
    for source, options, words in (
        (
            rows,
            {"question": "task"},
            "question='task' must name a column, got columns: 'problem', 'solution', 'level'",
        ),
        (
            rows,
            {"question": "problem", "answer": "gold"},
            "answer='gold' must name a column, got columns: 'problem'",
        ),
        (rows, {}, "name another column with question="),
        (twice, {"answer": "gold"}, "no other column may be named 'answer', got columns: 'question', 'gold', 'ans"),
        ([{"problem": ""}], {"question": "problem"}, "the question in column 'problem' must not be empty"),
    ):
        errors.check(lambda: af.tasks_from(source, **options), af.errors.TaskError, words)


def test_a_csv_file(tmp_path: Path) -> None:
    file = tmp_path / "sums.csv"
    file.write_bytes('\ufeffid,Problem,answer\r\n007,"2, then\n3",5.0\r\n\r\nb,été,\r\n'.encode())
    assert [(t.id, t.messages[0]["content"], t.fields) for t in af.load_tasks(file, question="Problem")] == [
        ("007", "2, then\n3", {"answer": "5.0"}),
        ("b", "été", {"answer": ""}),
    ]
    folder = tmp_path / "splits"
    folder.mkdir()
    (folder / "train.csv").write_text("question\na\n")
    (folder / "test.csv").write_text("question\n" + "b" * 200_000 + "\n")
    assert af.load_tasks(folder).splits == {"train": 1, "test": 1}
    assert len(af.load_tasks(folder, split="test")) == 1


def test_a_large_file_is_read_row_by_row(tmp_path: Path) -> None:
    file = write(tmp_path / "large.jsonl", [{"question": str(i), "answer": "x" * 1000} for i in range(5000)])
    rows = task_files.read_rows(file)
    next(rows)
    tracemalloc.start()
    assert sum(1 for _ in rows) == 4999
    assert tracemalloc.get_traced_memory()[1] < 500_000
    tracemalloc.stop()


def test_a_dataset_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load_dataset(*args: Any, split: str | None) -> Any:
        asked.append((*args, split))
        rows = [{"question": "2+3", "answer": "5"}]
        return rows if split else {"train": rows, "test": [{"question": "1+1", "answer": "2"}]}

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert af.load_tasks("openai/gsm8k", config="main").splits == {"train": 1, "test": 1}
    assert af.load_tasks("openai/gsm8k", split="train").splits == {"train": 1}
    assert asked == [("openai/gsm8k", "main", None), ("openai/gsm8k", None, "train")]

    def fails(*args: Any, **options: Any) -> Any:
        raise ConnectionError("no network")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=fails))
    errors.check(
        lambda: af.load_tasks("openai/gsm8k"),
        af.errors.TaskError,
        re.compile(
            r"^'openai/gsm8k' is not a folder and could not be loaded from the Hugging Face hub \(ConnectionError: no "
            r"network\); to load a file, pass its path, such as '\./openai/gsm8k\.jsonl'$"
        ),
    )
    monkeypatch.setitem(sys.modules, "datasets", None)
    errors.check(
        lambda: af.load_tasks("openai/gsm8k"),
        af.errors.TaskError,
        'Hugging Face hub, run: pip install "agentfly_kit[trl]"; to load a file',
    )
    write(tmp_path / "openai" / "gsm8k" / "train.jsonl", ROWS[:3])
    assert len(af.load_tasks("openai/gsm8k")) == 3, "an existing folder takes precedence"


def test_bundled_task_sets_load_and_are_disjoint() -> None:
    for name in task_files.bundled_names():
        tasks = af.load_tasks(name)
        assert len({task.id for task in tasks}) == len(tasks)
        assert not contents(tasks.train) & contents(tasks.test)


# --- splits --------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(min_size=1, max_size=2), min_size=2, max_size=30), st.floats(0.05, 0.9), st.randoms())
def test_held_out_tasks_share_no_content(questions: list[str], share: float, rng: random.Random) -> None:
    rows = [{"question": q} for q in questions]
    try:
        tasks = af.tasks_from(rows, test=share)
    except af.errors.TaskError:  # repeated content may not fit either split
        assert len(set(questions)) < len(questions)
        return
    assert not contents(tasks.train) & contents(tasks.test)
    assert len(tasks.train) + len(tasks.test) == len(rows)
    if len(set(questions)) == len(questions):
        assert len(tasks.test) == min(max(1, round(share * len(rows))), len(rows) - 1)
        rng.shuffle(rows)
        shuffled = af.tasks_from([{"id": f"other {i}", **row} for i, row in enumerate(rows)], test=share)
        assert contents(shuffled.test) == contents(tasks.test)  # the split depends on neither order nor ids


def test_the_split_column() -> None:
    rows = [{**row, "split": ("train", "test", "dev")[i % 3]} for i, row in enumerate(ROWS)]
    tasks = af.tasks_from(rows)
    assert tasks.splits == {"train": 14, "test": 13, "dev": 13}
    assert (len(tasks.train), len(tasks.split("dev"))) == (14, 13)
    assert "split" not in tasks[0].fields
    errors.check(
        lambda: af.tasks_from(rows, test=0.1),
        af.errors.TaskError,
        "must be None for rows that already have splits ('train', 'test', 'dev')",
    )
    alone = af.tasks_from(ROWS)
    assert alone.train == alone
    errors.check(lambda: alone.test, af.errors.TaskError, "must have the split 'test', got the splits none")
    for share in (0, 1, -0.1, True):
        errors.check(lambda: af.tasks_from(ROWS, test=share), af.errors.TaskError, "between 0 and 1")


def test_the_same_content_in_two_splits_is_rejected() -> None:
    rows = [{"id": "a", "question": "2+3", "answer": "5", "split": "train"}]
    rows.append({"id": "b", "question": "2+3", "answer": "5", "split": "test"})
    errors.check(
        lambda: af.tasks_from(rows, name="sums"),
        af.errors.TaskError,
        re.compile(r"^sums: tasks 'a' \(train\) and 'b' \(test\) have the same messages and fields"),
    )
    rows[1]["answer"] = "6"
    assert af.tasks_from(rows).splits == {"train": 1, "test": 1}


# --- a sequence ----------------------------------------------------------------------------------


def test_tasks_is_a_sequence_and_is_sampled_without_repetition() -> None:
    tasks = af.tasks_from(ROWS, test=0.25)
    assert isinstance(tasks[3:7], af.Tasks) and list(tasks[3:7]) == list(tasks)[3:7]
    assert tasks[-1] == list(tasks)[-1] and tasks[0] in tasks
    assert tasks.train[:2].splits == {"train": 2}
    same = af.tasks_from(ROWS, test=0.25)
    assert (tasks, hash(tasks)) == (same, hash(same)) and tasks != af.tasks_from(ROWS)
    drawn = tasks.sample(10, seed=3)
    assert drawn == tasks.sample(10, seed=3) != tasks.sample(10, seed=4)
    assert [len({t.id for t in some}) for some in (drawn, tasks.sample(40))] == [10, 40]


def test_repr_and_html() -> None:
    tasks = af.tasks_from([{"id": "a", "question": "<b>2+3</b>", "answer": "5"}, *ROWS], test=0.25)
    assert repr(tasks) == "Tasks(tasks: 41 (31 train, 10 test); fields: answer, level)"
    page = tasks._repr_html_()
    assert "&lt;b&gt;2+3&lt;/b&gt;" in page and "<b>2+3" not in page and "and 31 more" in page
    assert tasks.fields == ("answer", "level")


def test_the_fingerprint_depends_on_id_content_and_split() -> None:
    base = af.tasks_from(ROWS).fingerprint
    assert af.tasks_from(ROWS).fingerprint == base
    changed = [{**ROWS[0], "answer": "0"}, *ROWS[1:]]
    seen = {base, af.tasks_from(changed).fingerprint, af.tasks_from(ROWS, test=0.1).fingerprint}
    seen |= {af.tasks_from(ROWS[1:]).fingerprint, af.tasks_from([{"id": "x", **ROWS[0]}, *ROWS[1:]]).fingerprint}
    assert len(seen) == 5

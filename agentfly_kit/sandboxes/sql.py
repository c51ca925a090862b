"""A persistent database: changes survive from query to query and are discarded with the chain.

This module runs on the host: it sends queries and decodes rows. inside/sql.py runs the queries in the sandbox's
interpreter.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..errors import SandboxError, SettingsError, ToolError, check_choice, check_count, check_value
from .hosted import COPY_SECONDS, HostedSandbox, file_chunks
from .inside.values import decode
from .result import SandboxResult
from .settings import forward_signature

_MAX_CELL_WIDTH = 60  # maximum number of characters of a cell in `SQLResult.text`


@dataclass(frozen=True, slots=True, repr=False)
class SQLResult(SandboxResult):
    """The result of one `run`, with the columns and rows of the last statement.

    A value is None, bool, int, float, str, bytes, Decimal, date, time, datetime, timedelta, UUID, or a list, tuple or
    dict of these. `truncated` is True if rows are missing or a long value was cut off.

    Attributes:
        columns: Column names.
        types: The engine's name for the type of each column; None for sqlite, which does not report types.
        rows: One tuple of values per row.
        changed: Number of rows inserted, updated or deleted; None if the engine does not count them (duckdb).
        stdout, stderr, value, error, error_type, seconds, truncated, timed_out, died, limit, files_lost: See
            `SandboxResult`.
    """

    columns: tuple[str, ...] = ()
    types: tuple[str | None, ...] = field(default=(), repr=False)
    rows: tuple[tuple[Any, ...], ...] = ()
    changed: int | None = None

    @property
    def text(self) -> str:
        """The result as a plain-text table for a model to read, with notes on errors and truncation."""
        parts = [_table(self.columns, self.rows)] if self.columns else []
        if self.columns:
            parts.append(
                f"({len(self.rows)} row{'' if len(self.rows) == 1 else 's'}{' shown' if self.truncated else ''})"
            )
        elif self.ok:
            parts.append(
                "done" if not self.changed else f"done: {self.changed} row{'' if self.changed == 1 else 's'} changed"
            )
        if self.truncated:
            parts.append("[truncated; use LIMIT, WHERE or fewer columns to see the rest]")
        parts.append(self.error or "")
        if self.files_lost:
            parts.append("[the database was restored to its initial state: all changes are lost]")
        elif self.died:
            parts.append("[the database was reopened: uncommitted changes and temporary tables are lost]")
        return "\n".join(part for part in parts if part)


@forward_signature(HostedSandbox, omit=("packages", "preload"))
class SQLSandbox(HostedSandbox):
    """A private database in a confined process.

    Args:
        engine: "sqlite", or "duckdb" (`pip install "agentfly_kit[sql]"`).
        database: a database file in the engine's format. Every chain gets a copy; the file itself is never written.
        script: SQL statements to run in every fresh database, after copying `database`.
        max_rows: maximum number of rows in one result.

    The other settings are those of PythonSandbox; max_output limits the total number of characters in one result's
    rows.

    Statements cannot access other files: the engine rejects statements such as ATTACH and COPY, functions such as
    read_csv, and extensions, and its process is confined as in a PythonSandbox.
    """

    _inside_files = ("base", "values", "sql")

    def __init__(
        self,
        *,
        engine: str = "sqlite",
        database: str | os.PathLike[str] | None = None,
        script: str | None = None,
        max_rows: int = 100,
        **settings: Any,
    ) -> None:
        check_choice("engine", engine, Literal["sqlite", "duckdb"])
        if engine == "duckdb" and importlib.util.find_spec("duckdb") is None:
            raise SettingsError("engine='duckdb' needs duckdb; type: pip install \"agentfly_kit[sql]\"")
        check_count("max_rows", max_rows)
        if database is not None and not Path(database).is_file():
            raise SettingsError(f"database must be an existing file, got {str(database)!r}")
        is_duckdb = engine == "duckdb"
        super().__init__(packages=is_duckdb, preload=["sqlite3", "duckdb"] if is_duckdb else ["sqlite3"], **settings)
        self.engine = engine
        self.max_rows = max_rows
        self._script = script
        self._database = None if database is None else Path(database).read_bytes()

    async def _setup(self) -> None:
        await self._fill(self._database, self._script, COPY_SECONDS)

    async def _fill(self, database: bytes | None, script: str | None, timeout: float) -> None:
        if database is not None:
            await self._put(file_chunks("chain.db", 0o600, database))
        if script:
            result = await self._run(script, timeout)
            if not result.ok:
                raise SettingsError(f"the script of this SQLSandbox failed: {result.error}")

    async def run(self, sql: str, timeout: float = 5.0) -> SQLResult:
        """Run one or more statements and return the result of the last one.

        Each statement is committed immediately, unless a transaction was begun with BEGIN.

        After `timeout` seconds the query is interrupted, and the effects of the interrupted statement are rolled back.
        If the query does not stop, its process is killed, and the next call sees the state after the last finished
        statement.

        Raises:  SandboxError if the sandbox is closed or cannot be restarted. Failures of the query are not raised.
        """
        check_value("timeout", timeout, limit="above 0")
        async with self._exclusive():
            return await self._run(sql, timeout)

    async def _run(self, sql: str, timeout: float) -> SQLResult:
        result, reply = await self._send(
            "query",
            timeout,
            sql=sql,
            engine=self.engine,
            memory_mb=self.limits.memory_mb,
            max_rows=self.max_rows,
            max_chars=self.max_output,
            max_cell_chars=max(256, self.max_output // 4),
        )
        found: dict[str, Any] = {}
        limit, error, died = result.limit, result.error, result.died
        try:
            found = self._read_answer(reply["answer"])
            error = found.pop("error")
            limit = found.pop("limit") or limit
        except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError, RecursionError):
            found = {}
            if result.timed_out and not died:
                error = f"stopped: time limit of {timeout:g} s exceeded"
            elif limit is not None and not died:
                error = f"stopped: {limit} limit exceeded"
            error = error or "the database returned no valid result"
        if limit == "memory" and self.engine == "duckdb" and not died:
            # After a failed allocation, DuckDB may hang in its next query (seen in 1 of 8 runs with version 2.0).
            died = (await self._execute("import os\nos._exit(0)", 5.0)).died
        return SQLResult(
            error=error,
            seconds=result.seconds,
            timed_out=result.timed_out,
            died=died,
            limit=limit,
            files_lost=result.files_lost,
            **found,
        )

    def _read_answer(self, answer: Any) -> dict[str, Any]:
        """Convert an untrusted answer from inside the sandbox to attributes of an SQLResult."""
        text = {name: None if answer.get(name) is None else str(answer[name]) for name in ("error", "type", "limit")}
        return {
            "columns": tuple(str(name) for name in answer["columns"]),
            "types": tuple(None if each is None else str(each) for each in answer["types"]),
            "rows": tuple(tuple(decode(each, _refuse) for each in row) for row in answer["rows"][: self.max_rows]),
            "changed": None if answer["changed"] is None else int(answer["changed"]),
            "truncated": bool(answer["more"] or answer["cut"]),
            "error": text["error"],
            "error_type": text["type"],
            "limit": text["limit"] if text["limit"] in ("memory", "disk") else None,
        }

    async def renew(self, script: str | None = None, *, database: bytes | None = None, timeout: float = 60.0) -> None:
        """Replace the database with a new one in the same process.

        This is several times faster than `reset`, which restarts the process and restores the initial database.

        Args:
            script: SQL statements to run in the new database.
            database: content of a database file; by default the new database is empty.
            timeout: seconds for the script.

        Raises:  SettingsError if the script fails; SandboxError if the sandbox is closed or `database` exceeds disk_mb.
        """
        async with self._exclusive():
            try:
                await self._request_locked("renew")
            except ToolError as error:
                raise SandboxError(f"the database of this SQLSandbox could not be replaced: {error}") from None
            await self._fill(database, script, timeout)

    async def fork(self, into: SQLSandbox) -> None:
        """Copy the database to another sandbox.

        Raises:  SandboxError if a transaction is open or there are temporary tables. `into` is then reset.
        """
        if into.engine != self.engine:
            raise SandboxError(f"into must be a SQLSandbox with engine {self.engine!r}, got {into.engine!r}")
        async with self._copying(into):
            await self._request_locked("settle", engine=self.engine)
            await self._copy_home(into)


def _refuse(tagged: Any) -> Any:
    raise ValueError(f"the sandbox returned a value that has no database type: {tagged!r:.80}")


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Format a table: a header such as "name | age", a line of dashes, and one line per row."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max([len(name), *(len(row[at]) for row in cells if at < len(row))]) for at, name in enumerate(columns)]
    lines = [
        [name.ljust(width) for name, width in zip(columns, widths, strict=True)],
        ["-" * width for width in widths],
    ]
    lines += [[cell.ljust(width) for cell, width in zip(row, widths, strict=False)] for row in cells]
    marks = [" | ", "-+-", *[" | "] * len(cells)]
    return "\n".join(mark.join(line).rstrip() for mark, line in zip(marks, lines, strict=True))


def _cell(value: Any) -> str:
    if value is None:
        return "NULL"
    text = f"<{len(value)} bytes>" if isinstance(value, bytes) else str(value)
    text = text.replace("\n", "\\n")
    return text if len(text) <= _MAX_CELL_WIDTH else f"{text[: _MAX_CELL_WIDTH - 3]}..."

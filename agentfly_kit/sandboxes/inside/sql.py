"""The database of a SQLSandbox, from inside: one file, opened by sqlite3 or duckdb, that no statement can leave.

It follows base.py in one namespace. A query runs on a thread of its own, because the main one must be free to hear
that its time is up and to interrupt it.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import os
import sqlite3
import threading
import uuid
from collections.abc import Callable
from typing import Any

from .base import CALLS, Refused, home

INTERRUPT_SECONDS = 0.01
LONGEST = 16 * 2**20  # bytes of one value or statement that sqlite takes
SQLITE_DENIED = {sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH}
PRAGMAS_DENIED = {"temp_store_directory", "data_store_directory", "key", "rekey", "hexkey", "module_list"}


class Database:
    """The open connection, and what must be said of it. `engine` is "" as long as none is open."""

    engine = ""
    connection: Any = None


def path() -> str:
    return os.path.join(home(), "chain.db")


def authorize(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    """What sqlite asks before each step of a statement's plan: other files are none of its business."""
    if action in SQLITE_DENIED:
        return sqlite3.SQLITE_DENY
    if action == sqlite3.SQLITE_PRAGMA and (first or "").lower() in PRAGMAS_DENIED:
        return sqlite3.SQLITE_DENY
    if action == sqlite3.SQLITE_FUNCTION and (second or "").lower() == "load_extension":
        return sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_OK


def open_database(engine: str, memory_mb: int | None) -> None:
    if Database.engine == engine:
        return
    connection: Any
    if engine == "sqlite":
        connection = sqlite3.connect(path(), isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA synchronous=OFF")  # a kill loses nothing; a power cut takes the sandbox anyway
        connection.execute("PRAGMA temp_store=MEMORY")
        if hasattr(connection, "setlimit"):
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST)
            connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        connection.set_authorizer(authorize)
    else:
        import duckdb  # type: ignore[import-not-found, unused-ignore]

        settings: dict[str, Any] = {
            "threads": 1, "temp_directory": "", "autoinstall_known_extensions": "false",
            "autoload_known_extensions": "false",
        }  # fmt: skip
        if memory_mb is not None:
            settings["memory_limit"] = f"{max(16, memory_mb // 2)}MiB"
        connection = duckdb.connect(path(), config=settings)
        connection.execute("SET enable_external_access=false")
        connection.execute("SET lock_configuration=true")
    Database.connection, Database.engine = connection, engine


def close_database() -> None:
    if Database.connection is not None:
        Database.connection.close()
    Database.connection, Database.engine = None, ""


def renew() -> None:
    """Nothing is left of the database; the next query opens an empty one, or the file that is put in its place."""
    close_database()
    for end in ("", "-journal", "-wal", "-shm", ".wal"):
        try:
            os.unlink(path() + end)
        except FileNotFoundError:
            pass


def statements(script: str) -> list[str]:
    """sqlite3 takes one statement at a time."""
    found, begun = [], 0
    for at, char in enumerate(script):
        if char == ";" and sqlite3.complete_statement(script[begun : at + 1]):
            found.append(script[begun : at + 1])
            begun = at + 1
    return [*found, script[begun:]] if script[begun:].strip() else found


def interruptible(work: Callable[[], Any]) -> Any:
    """Run it on a thread. Raises what stopped the wait (an interrupt, say) when the query has ended."""
    outcome: list[Any] = []
    done = threading.Event()

    def target() -> None:
        try:
            outcome.append((True, work()))
        except BaseException as error:
            outcome.append((False, error))
        finally:
            done.set()

    try:
        threading.Thread(target=target, daemon=True).start()
        done.wait()
    except BaseException:
        # Again and again: an interrupt that comes before the query has begun is forgotten. While it goes on there is no
        # answer, and the host kills this process: a query left running would be in the way of the next.
        while not done.wait(INTERRUPT_SECONDS):
            if Database.connection is not None:
                Database.connection.interrupt()
        raise
    good, value = outcome[0]
    if good:
        return value
    raise value


def query(
    sql: str, engine: str, memory_mb: int | None, max_rows: int, max_chars: int, max_cell_chars: int
) -> dict[str, Any]:
    """Run every statement; the rows are the last one's. `max_chars` in all, `max_cell_chars` in one value."""
    return interruptible(lambda: run_query(sql, engine, memory_mb, max_rows, max_chars, max_cell_chars))  # type: ignore[no-any-return]


def run_query(
    sql: str, engine: str, memory_mb: int | None, max_rows: int, max_chars: int, max_cell_chars: int
) -> dict[str, Any]:
    open_database(engine, memory_mb)
    connection = Database.connection
    reply: dict[str, Any] = {"columns": [], "types": [], "rows": [], "more": False, "cut": False, "changed": None}
    try:
        if engine == "sqlite":
            before = connection.total_changes
            cursor = connection.cursor()
            for statement in statements(sql):
                cursor = connection.execute(statement)
            reply["changed"] = connection.total_changes - before
        else:
            cursor = connection.execute(sql)
        if cursor.description:
            reply["columns"] = [column[0] for column in cursor.description]
            reply["types"] = [None if column[1] is None else str(column[1]) for column in cursor.description]
            fetch(cursor, reply, max_rows, max_chars, max_cell_chars)
        if engine == "sqlite":
            cursor.close()  # a statement that was not read to its end keeps the tables locked
    except Exception as error:
        name = type(error).__name__
        reply["error"], reply["type"] = str(error) or name, name
        if isinstance(error, MemoryError) or "out of memory" in str(error).lower():
            reply["limit"] = "memory"
        elif "disk is full" in str(error).lower() or "No space left" in str(error):
            reply["limit"] = "disk"
    return reply


def fetch(cursor: Any, reply: dict[str, Any], max_rows: int, max_chars: int, max_cell_chars: int) -> None:
    while len(reply["rows"]) < max_rows:
        row = cursor.fetchone()
        if row is None:
            return
        values = []
        for value in row:
            if isinstance(value, str | bytes) and len(value) > max_cell_chars:
                value, reply["cut"] = value[:max_cell_chars], True
            value = tagged(value)
            max_chars -= len(str(value)) + 1
            values.append(value)
        if max_chars < 0 and reply["rows"]:
            reply["more"] = True
            return
        reply["rows"].append(values)
    reply["more"] = cursor.fetchone() is not None


def tagged(value: Any) -> Any:
    """A value that JSON has no form for becomes {"kind": text}."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return {"bytes": base64.b64encode(bytes(value)).decode()}
    if isinstance(value, datetime.datetime):
        return {"datetime": value.isoformat()}
    if isinstance(value, datetime.date):
        return {"date": value.isoformat()}
    if isinstance(value, datetime.time):
        return {"time": value.isoformat()}
    if isinstance(value, datetime.timedelta):
        return {"seconds": value.total_seconds()}
    if isinstance(value, decimal.Decimal):
        return {"decimal": str(value)}
    if isinstance(value, uuid.UUID):
        return {"uuid": str(value)}
    if isinstance(value, list | tuple):
        return {"list": [tagged(each) for each in value]}
    if isinstance(value, dict):
        return {"dict": [[tagged(name), tagged(each)] for name, each in value.items()]}
    return {"text": str(value)}


def settle(engine: str) -> None:
    """Write all to the file and close it, so that the file can be copied.

    Raises:  Refused for what the file does not hold.
    """
    if Database.engine:
        connection = Database.connection
        if engine == "sqlite":
            if connection.in_transaction:
                raise Refused("a transaction is open; COMMIT or ROLLBACK first")
            if connection.execute("SELECT count(*) FROM sqlite_temp_master").fetchone()[0]:
                raise Refused("there are temporary tables or views, which are not in the database's file")
        else:
            if connection.execute("SELECT count(*) FROM duckdb_tables() WHERE temporary").fetchone()[0]:
                raise Refused("there are temporary tables, which are not in the database's file")
            try:
                connection.execute("BEGIN")
                connection.execute("ROLLBACK")
            except Exception:
                raise Refused("a transaction is open; COMMIT or ROLLBACK first") from None
    close_database()


CALLS |= {"query": query, "renew": renew, "settle": settle}

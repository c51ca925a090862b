"""The part of a SQLSandbox that runs inside: a database in one file, without access to other files.

This file runs after base.py and values.py in the same namespace. A query runs on a separate thread, so that the main
thread can receive the interrupt after a timeout and interrupt the query.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable
from typing import Any

from .base import CALLS, Refused, home
from .values import encode

INTERRUPT_SECONDS = 0.01
LONGEST = 16 * 2**20  # maximum bytes of one value or statement in sqlite
SQLITE_DENIED = {sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH}
PRAGMAS_DENIED = {"temp_store_directory", "data_store_directory", "key", "rekey", "hexkey", "module_list"}


class Database:
    """The open connection and the name of its database engine, which is "" while no connection is open."""

    engine = ""
    connection: Any = None


def path() -> str:
    return os.path.join(home(), "chain.db")


def authorize(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    """Authorizer callback of sqlite: deny statements that can access other files."""
    denied = (
        action in SQLITE_DENIED
        or (action == sqlite3.SQLITE_PRAGMA and (first or "").lower() in PRAGMAS_DENIED)
        or (action == sqlite3.SQLITE_FUNCTION and (second or "").lower() == "load_extension")
    )
    return sqlite3.SQLITE_DENY if denied else sqlite3.SQLITE_OK


def open_database(engine: str, memory_mb: int | None) -> None:
    if Database.engine == engine:
        return
    connection: Any
    if engine == "sqlite":
        connection = sqlite3.connect(path(), isolation_level=None, check_same_thread=False)
        # Killing the process does not lose data; only a power failure does.
        connection.execute("PRAGMA synchronous=OFF")
        connection.execute("PRAGMA temp_store=MEMORY")
        if hasattr(connection, "setlimit"):
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST)
            connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        connection.set_authorizer(authorize)
    else:
        import duckdb  # type: ignore[import-not-found, unused-ignore]

        settings: dict[str, Any] = {
            "threads": 1,
            "temp_directory": "",
            "autoinstall_known_extensions": "false",
            "autoload_known_extensions": "false",
        }
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
    """Close and delete the database. The next query creates an empty one, unless the host has sent a database file."""
    close_database()
    for end in ("", "-journal", "-wal", "-shm", ".wal"):
        try:
            os.unlink(path() + end)
        except FileNotFoundError:
            pass


def statements(script: str) -> list[str]:
    """Split a script into statements, because sqlite3 executes one at a time."""
    found, begun = [], 0
    for at, char in enumerate(script):
        if char == ";" and sqlite3.complete_statement(script[begun : at + 1]):
            found.append(script[begun : at + 1])
            begun = at + 1
    return [*found, script[begun:]] if script[begun:].strip() else found


def interruptible(work: Callable[[], Any]) -> Any:
    """Run a query on a thread. If an exception interrupts the wait, stop the query before re-raising it."""
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
        # Interrupt repeatedly, because an interrupt has no effect before the query has begun. Do not return while the
        # query runs, since it would block the next one. If the query does not end, the host kills this process.
        while not done.wait(INTERRUPT_SECONDS):
            if Database.connection is not None:
                Database.connection.interrupt()
        raise
    good, value = outcome[0]
    if good:
        return value
    raise value


def query(**arguments: Any) -> Any:
    return interruptible(lambda: run_query(**arguments))


def run_query(
    sql: str, engine: str, memory_mb: int | None, max_rows: int, max_chars: int, max_cell_chars: int
) -> dict[str, Any]:
    """Run all statements. Return the last one's rows, limited to `max_chars` and `max_cell_chars` per value."""
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
            cursor.close()  # a statement whose rows were not all read keeps the tables locked
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
            value = encode(value, str)
            max_chars -= len(str(value)) + 1
            values.append(value)
        if max_chars < 0 and reply["rows"]:
            reply["more"] = True
            return
        reply["rows"].append(values)
    reply["more"] = cursor.fetchone() is not None


def settle(engine: str) -> None:
    """Write all data to the file and close the database, so that the file can be copied."""
    if Database.engine:
        connection = Database.connection
        if engine == "sqlite":
            if connection.in_transaction:
                raise Refused("a transaction is open; COMMIT or ROLLBACK first")
            if connection.execute("SELECT count(*) FROM sqlite_temp_master").fetchone()[0]:
                raise Refused("there are temporary tables or views, which the database file does not contain")
        else:
            if connection.execute("SELECT count(*) FROM duckdb_tables() WHERE temporary").fetchone()[0]:
                raise Refused("there are temporary tables, which the database file does not contain")
            try:
                connection.execute("BEGIN")
                connection.execute("ROLLBACK")
            except Exception:
                raise Refused("a transaction is open; COMMIT or ROLLBACK first") from None
    close_database()


CALLS |= {"query": query, "renew": renew, "settle": settle}

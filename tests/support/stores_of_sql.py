"""Databases for tests of SQLAlchemy: a file of SQLite, and a server of MariaDB where one is installed.

`MARIADB_OF_TESTS` names a folder with `mariadbd`, else it is looked for on the machine.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from waiting import until

_HOST = "127.0.0.1"
_STOP_S_MAX = 60


class MariaUnavailable(Exception):
    """MariaDB cannot be started on this machine."""


@dataclass(frozen=True)
class Database:
    """An empty database at a URL of SQLAlchemy."""

    url: str

    def execute(self, statement: str) -> list[tuple[Any, ...]]:
        """Runs a statement. Returns its rows."""
        engine = sa.create_engine(self.url)
        try:
            with engine.begin() as connection:
                result = connection.exec_driver_sql(statement)
                return [tuple(row) for row in result] if result.returns_rows else []
        finally:
            engine.dispose()


@contextmanager
def run_mariadb() -> Iterator[str]:
    """Starts a server on loopback. Gives the URL of it without a database. Raises MariaUnavailable."""
    chosen = os.environ.get("MARIADB_OF_TESTS")
    program = shutil.which("mariadbd", path=chosen or f"{os.environ.get('PATH', '')}:/usr/sbin")
    if program is None:
        raise MariaUnavailable("there is no mariadbd; apt install mariadb-server")
    with tempfile.TemporaryDirectory(prefix="tidegate-mariadb-", dir="/tmp") as name:
        folder = Path(name)
        (folder / "data" / "mysql").mkdir(parents=True)
        with socket.create_server((_HOST, 0)) as probe:
            port = int(probe.getsockname()[1])
        start = [
            program, "--no-defaults", f"--datadir={folder}/data", f"--socket={folder}/s", f"--bind-address={_HOST}",
            f"--port={port}", "--skip-grant-tables", "--skip-networking=0", "--user=root",
            f"--lc-messages-dir={Path(program).parent.parent}/share/mysql", "--innodb-buffer-pool-size=16M",
            "--innodb-flush-log-at-trx-commit=0",
            f"--pid-file={folder}/pid",
        ]  # fmt: skip
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(start, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            url = f"mysql+pymysql://tester@{_HOST}:{port}/"
            until("MariaDB", lambda: process.poll() is not None or _answers(url))
            if process.poll() is not None:
                raise MariaUnavailable((folder / "log").read_text(errors="replace")[-300:].replace("\n", " "))
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOP_S_MAX)
            finally:
                process.kill()
                process.wait()


@contextmanager
def new_mariadb_database(url: str) -> Iterator[Database]:
    """Makes a database, and drops it."""
    name = f"t{uuid.uuid4().hex[:12]}"
    Database(url).execute(f"CREATE DATABASE {name} CHARACTER SET utf8mb4")
    try:
        yield Database(url + name)
    finally:
        Database(url).execute(f"DROP DATABASE {name}")


def _answers(url: str) -> bool:
    try:
        return Database(url).execute("SELECT 1") == [(1,)]
    except sa.exc.OperationalError:
        return False

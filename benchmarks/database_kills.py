"""A job into tables of PostgreSQL is killed again and again: is every row there exactly once?

    python benchmarks/database_kills.py [--kills 100] [--rate 2000] [--interval 100ms] [--seed 1] [--limit 1800]

The server is the one of the tests, on loopback. A process runs a job on the local runtime that writes the numbers of a
rate source to three tables: `appended` (mode "append", without an index, so a doubled row stays visible), `latest`
(upsert of rows) and `totals` (upsert of the changes of a running aggregate). The process gets SIGKILL, and another one
runs the program again with `restore="latest_or_fresh"`. Processes are forked from one that has imported everything, so
they start soon. The seed draws the moment of each kill:

    any       after a random time, also while the job starts
    open      while a transaction of a commit is open
    locked    while a transaction waits to store its tokens, because this script holds a lock on them. The server
              continues the statement after the kill, and finds that its client is gone
    stored    right after the tokens of a checkpoint are stored, before the job can take down that they are

In the end the job stops with a savepoint. `appended` must have the numbers of each split from the first on, each once,
and the other tables must be what follows from it. Before each kill the script looks at the transactions of the job, and
afterwards whether tokens were stored by the server all the same.

Exit code 1 if a row is lost, doubled or wrong, or the job is stuck. After `--limit` seconds there are no more kills.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from pkgutil import walk_packages
from typing import Any

import polars as pl
import psycopg
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from postgres_server import PostgresDatabase, new_database, run_postgres

import tidegate as tg

KEYS = 500
SPLITS = 2
KINDS = ("any", "open", "locked", "stored")
ANY_S_MAX = 3.0
STUCK_S = 600.0
PAUSE_S = 0.001
TABLES = (
    "CREATE TABLE appended (id bigint, k bigint)",
    "CREATE TABLE latest (k bigint PRIMARY KEY, id bigint)",
    "CREATE TABLE totals (k bigint PRIMARY KEY, n bigint, total numeric)",
)
TOKENS = "SELECT coalesce(sum(checkpoint_id), 0)::bigint, count(*) FROM tidegate_commits WHERE sink = 'appended'"
SESSIONS = "FROM pg_stat_activity WHERE application_name = 'tidegate' AND datname = current_database()"
OPEN = f"SELECT count(*) {SESSIONS} AND xact_start IS NOT NULL"
WAITING = f"SELECT count(*) {SESSIONS} AND wait_event_type = 'Lock'"


def run_job(folder: Path, dsn: str, rate: int, interval: str, commands: Connection) -> None:
    """Run the job until a command arrives; then stop it with a savepoint, and send its end."""
    log = os.open(folder / "job.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    with tg.StreamEnvironment.local(2) as env:
        numbers = env.from_rate(rate, splits=SPLITS, uid="numbers", parallelism=2)
        rows = numbers.select(id=pl.col("value"), k=pl.col("value") % KEYS)
        rows.to_postgres(dsn, "appended", uid="appended")
        rows.to_postgres(dsn, "latest", mode="upsert", keys="k", uid="latest")
        totals = rows.key_by("k").aggregate(n=tg.count(), total=tg.sum("id"), emit="changes", uid="sums")
        totals.to_postgres(dsn, "totals", mode="upsert", keys="k", uid="totals")
        checkpoints = tg.CheckpointConfig(interval=interval, storage=str(folder / "checkpoints"))
        job = env.execute(
            "kills",
            checkpoints=checkpoints,
            restart=tg.RestartStrategy.none(),
            restore="latest_or_fresh",
            progress="off",
        )
        commands.recv()
        job.stop(savepoint=str(folder / "savepoints"))
        commands.send(job.wait("4min"))


def preloaded() -> list[str]:
    """Return the modules that a job on the local runtime may import."""
    packages = ("api", "actors", "operators", "connectors.sql", "state", "storage", "protocol", "recovery")
    found = ["pandas", "numba", "adbc_driver_postgresql.dbapi"]
    for package in packages:
        folder = Path(tg.__file__).parent / package.replace(".", "/")
        found += [each.name for each in walk_packages([str(folder)], f"tidegate.{package}.")]
    return [name for name in found if ".ray" not in name and "spark" not in name]


class Killer:
    """Starts the process of the job, and kills it."""

    def __init__(self, database: PostgresDatabase, folder: Path, rate: int, interval: str, seed: int) -> None:
        self._database = database
        self._folder = folder
        self._options = folder, database.dsn, rate, interval
        self._rng = random.Random(seed)
        self._looker = psycopg.connect(database.dsn, autocommit=True)
        self._processes = get_context("forkserver")
        self._processes.set_forkserver_preload(["__main__", *preloaded()])
        self._commands, _ = self._processes.Pipe()
        self._process: ForkServerProcess | None = None
        self.kinds: Counter[str] = Counter()
        self.found: Counter[str] = Counter()
        """The state of the transactions at each kill, and what became of them."""

    def start(self) -> None:
        """Start the process. Does not wait for its first rows."""
        self._commands, of_job = self._processes.Pipe()
        self._process = self._processes.Process(target=run_job, args=(*self._options, of_job), daemon=True)
        self._process.start()
        of_job.close()

    def kill(self, kind: str) -> None:
        """Kill the process at a moment of this kind."""
        process = self._running()
        if kind == "any":
            time.sleep(self._rng.random() * ANY_S_MAX)
            self._strike(process)
        elif kind == "open":
            self._until(lambda: self._count(OPEN) > 0, "an open transaction")
            self._strike(process)
        elif kind == "stored":
            before = self._tokens()
            self._until(lambda: self._tokens() != before, "new tokens")
            self._strike(process)
        else:
            # The table of tokens exists as soon as the program of the job was made once.
            self._until(lambda: self._tokens() is not None, "the table of tokens")
            with self._locked_tokens() as release:
                self._until(lambda: self._count(WAITING) > 0, "a transaction that waits")
                self._strike(process, release)
        self.kinds[kind] += 1

    def finish(self) -> str:
        """Stop the job with a savepoint. Returns its end."""
        before = self._tokens()
        self._until(lambda: self._tokens() != before, "new tokens")
        self._commands.send("stop")
        if not self._commands.poll(STUCK_S):
            raise TimeoutError(f"the job does not stop: {self._why()}")
        end = str(self._commands.recv())
        self._running().join(STUCK_S)
        return end

    def close(self) -> None:
        """End the process and the connection."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
        self._looker.close()

    def _strike(self, process: ForkServerProcess, release: Callable[[], None] | None = None) -> None:
        before, in_transaction = self._tokens(), self._count(OPEN)
        process.kill()
        process.join(STUCK_S)
        if release is not None:
            release()
        # The server ends what it does, and then finds that the client is gone.
        self._until(lambda: self._count(f"SELECT count(*) {SESSIONS}") == 0, "the end of the sessions", alive=False)
        stored = "tokens stored" if self._tokens() != before else "no tokens stored"
        self.found[f"{'in' if in_transaction else 'outside of'} a transaction, {stored} after the last look"] += 1

    @contextmanager
    def _locked_tokens(self) -> Any:
        with psycopg.connect(self._database.dsn) as connection:
            connection.execute("LOCK TABLE tidegate_commits IN EXCLUSIVE MODE")
            yield connection.rollback

    def _running(self) -> ForkServerProcess:
        assert self._process is not None
        return self._process

    def _count(self, query: str) -> int:
        row = self._looker.execute(query.encode()).fetchone()
        assert row is not None
        return int(row[0])

    def _tokens(self) -> tuple[int, int] | None:
        try:
            row = self._looker.execute(TOKENS).fetchone()
        except psycopg.errors.UndefinedTable:
            return None
        assert row is not None
        return row[0], row[1]

    def _until(self, condition: Callable[[], bool], what: str, *, alive: bool = True) -> None:
        deadline = time.monotonic() + STUCK_S
        while not condition():
            if alive and not self._running().is_alive():
                raise RuntimeError(f"the job ended by itself while waiting for {what}: {self._why()}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited in vain for {what}: {self._why()}")
            time.sleep(PAUSE_S)

    def _why(self) -> str:
        return (self._folder / "job.log").read_text(errors="replace")[-2_000:]


def differences(database: PostgresDatabase) -> tuple[int, list[str]]:
    """Returns the number of appended rows, and a line for each difference to what the tables must have."""
    appended = pl.DataFrame(database.execute("SELECT id, k FROM appended"), schema=["id", "k"], orient="row")
    lines = []
    if (doubled := appended.height - appended["id"].n_unique()) > 0:
        lines.append(f"appended: {doubled} rows are doubled")
    for split in range(SPLITS):
        ids = appended.filter(pl.col("id") % SPLITS == split)["id"].unique().sort()
        expected = range(split, (ids[-1] if len(ids) else -1) + 1, SPLITS)
        if lost := len(expected) - len(ids):
            lines.append(f"appended: {lost} rows of split {split} are lost, up to {ids[-1]}")
    wrong_keys = appended.filter(pl.col("id") % KEYS != pl.col("k")).height
    if wrong_keys:
        lines.append(f"appended: {wrong_keys} rows have another key")
    by_key = appended.unique("id").group_by("k").agg(pl.col("id").max(), n=pl.len(), total=pl.col("id").sum())
    expected_latest = set(by_key.select("k", "id").rows())
    expected_totals = set(by_key.select("k", "n", "total").rows())
    for table, expected_rows in (("latest", expected_latest), ("totals", expected_totals)):
        columns = "k, id" if table == "latest" else "k, n, total::bigint"
        found = set(database.execute(f"SELECT {columns} FROM {table}"))
        if found != expected_rows:
            lines.append(
                f"{table}: {len(expected_rows - found)} rows are missing or wrong, such as "
                f"{sorted(expected_rows - found)[:3]}; {len(found - expected_rows)} are too many, such as "
                f"{sorted(found - expected_rows)[:3]}"
            )
    return appended.height, lines


def main() -> int:
    """Kill, check and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--rate", type=int, default=2_000)
    parser.add_argument("--interval", default="100ms")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=1_800.0)
    given = parser.parse_args()
    from common import describe_machine  # imports Ray, without which the process of the job starts sooner

    console = Console()
    describe_machine(console)
    rng = random.Random(given.seed)
    folder = Path(tempfile.mkdtemp(prefix="tidegate-kills-"))
    began = time.monotonic()
    with run_postgres() as server, new_database(server) as database:
        console.print(server.execute("SELECT version()")[0][0])
        for statement in TABLES:
            database.execute(statement)
        killer = Killer(database, folder, given.rate, given.interval, given.seed)
        try:
            kills = 0
            while kills < given.kills and time.monotonic() - began < given.limit:
                killer.start()
                killer.kill(rng.choice(KINDS))
                kills += 1
                if kills % 10 == 0:
                    console.print(f"{kills} kills, {time.monotonic() - began:.0f} s: {dict(killer.kinds)}")
            killer.start()
            end = killer.finish()
        finally:
            killer.close()
        rows, lines = differences(database)
    console.print(f"{kills} kills in {time.monotonic() - began:.0f} s, seed {given.seed}; the job is {end}")
    for state, count in sorted(killer.found.items()):
        console.print(f"  {count:4} {state}")
    console.print(f"{rows:,} rows appended; " + ("; ".join(lines) or "0 lost, 0 doubled, upserts equal"))
    if not lines:
        shutil.rmtree(folder)
    return 1 if lines or end != "suspended" or not rows else 0


if __name__ == "__main__":
    sys.exit(main())

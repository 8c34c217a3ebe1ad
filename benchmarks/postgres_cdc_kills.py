"""Kills of a job that follows a PostgreSQL table, while transactions go on: nothing may be lost or doubled.

    .venv/bin/python benchmarks/postgres_cdc_kills.py [KILLS] [--seed N]

The server is the server of the tests, on loopback. A process runs a local job: `from_postgres_cdc` to a table with the
same rows, and sums and counts of groups of rows to another table, which show a change that came twice. SIGKILL ends the
process at moments that the seed draws: up to 50 ms after a checkpoint was requested, as soon as one has completed, and,
with a new slot for every eighth kill, up to 150 ms after the first one, while the snapshot is read. The next process
restores the latest checkpoint. Before each new slot and at the end transactions stop until both tables are right. The
exit code is 1 if they are not.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from postgres_server import PostgresDatabase, new_database, run_postgres

import tidegate as tg

_FORKS = multiprocessing.get_context("forkserver")
KEYS = 400
SNAPSHOT_ROWS = 20_000
"""Rows that are there before the first process. Their keys are never changed."""
STUCK_S = 600.0
MOMENTS = ("during a checkpoint", "between checkpoints", "in the snapshot")
KILLS_A_SLOT = 8
"""The first kill of each slot comes while the snapshot is read."""
IMPORTS = ("tidegate.api.environment", "tidegate.connectors.postgres_cdc.source", "pandas", "polars", "psycopg")
"""Modules of the process that the processes of the job are forks of."""


def follow(dsn: str, slot: str, folder: str, notes: Connection) -> None:
    """Runs the job until it is killed, and sends "begin" and "end" of each checkpoint."""
    env = tg.StreamEnvironment.local(1)
    rows = env.from_postgres_cdc(dsn, tables=["items"], slot=slot, uid="cdc")["items"]
    rows.to_table(f"{folder}/rows", mode="upsert", keys=["id"], uid="rows", if_exists="append")
    sums = rows.key_by("name").aggregate(total=tg.sum("n"), rows=tg.count(), emit="changes", uid="sums")
    sums.to_table(f"{folder}/sums", mode="upsert", keys=["name"], uid="sums-table", if_exists="append")
    storage = tg.CheckpointConfig(interval="1h", storage=f"{folder}/checkpoints")
    job = env.execute("job", checkpoints=storage, restore="latest", progress="off")
    while job.status() in ("created", "deploying"):
        time.sleep(0.01)
    while True:
        notes.send("begin")
        job.trigger_checkpoint()
        notes.send("end")


class Writer:
    """A thread of random transactions. `pause` returns when the current one is over."""

    def __init__(self, database: PostgresDatabase, seed: int) -> None:
        self._database = database
        self._random = Random(seed)
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self.transactions = 0
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self._thread.start()

    def pause(self) -> threading.Lock:
        """Returns a lock; no transaction begins while it is held."""
        return self._lock

    def stop(self) -> None:
        """Ends the thread."""
        self._stopped.set()
        self._thread.join(60)

    def _run(self) -> None:
        random = self._random
        with self._database.connect() as connection:
            while not self._stopped.wait(0.01):
                with self._lock, connection.transaction():
                    for _ in range(random.randrange(1, 60)):
                        key = random.randrange(KEYS)
                        connection.execute(
                            random.choice(
                                (
                                    f"INSERT INTO items VALUES ({key}, 'g{key % 7}', {key}) ON CONFLICT DO NOTHING",
                                    f"UPDATE items SET n = n + 1, name = 'g{random.randrange(7)}' WHERE id = {key}",
                                    f"DELETE FROM items WHERE id = {key}",
                                )
                            )
                        )
                self.transactions += 1


class Started:
    """A process of the job, and the notes that it sends."""

    def __init__(self, process: ForkServerProcess, notes: Connection) -> None:
        self._process = process
        self._notes = notes

    def await_notes(self, wanted: str, count: int) -> None:
        """Waits until a note has come this often. Raises RuntimeError if the process ends before, or is stuck."""
        while count:
            if not self._notes.poll(STUCK_S):
                raise RuntimeError(f"the job took no checkpoint for {STUCK_S:.0f} s")
            try:
                note = self._notes.recv()
            except EOFError:
                self._process.join()
                raise RuntimeError(f"the job ended by itself, with {self._process.exitcode}") from None
            count -= note == wanted

    def drain(self) -> None:
        """Reads notes, so that the process never waits for a full pipe."""
        while self._notes.poll():
            self._notes.recv()

    def end(self) -> None:
        """Ends the process with SIGKILL."""
        self._process.kill()
        self._process.join()
        self._notes.close()


class Runs:
    """The processes of the job, one after the other. Each slot has a folder of tables and checkpoints."""

    def __init__(self, database: PostgresDatabase, folder: Path) -> None:
        self._database = database
        self._root = folder
        self.number = 0
        self.begin_anew()

    def begin_anew(self) -> None:
        """The next process begins without a checkpoint, with another slot. The slot before is dropped."""
        if self.number:
            slot = f"kills_{self.number}"
            self._await(lambda: not self._database.execute(
                "SELECT 1 FROM pg_replication_slots WHERE slot_name = %s AND active", slot
            ), "the slot to be free")  # fmt: skip
            self._database.execute("SELECT pg_drop_replication_slot(%s)", slot)
        self.number += 1
        self.folder = self._root / str(self.number)
        self.folder.mkdir()

    def start(self) -> Started:
        """Starts a process."""
        mine, its = _FORKS.Pipe(duplex=False)
        process = _FORKS.Process(
            target=follow, args=(self._database.dsn, f"kills_{self.number}", str(self.folder), its)
        )
        process.start()
        its.close()
        return Started(process, mine)

    def differences(self) -> dict[str, int]:
        """Returns how many rows are lost, and how many are there that must not be, in both tables."""
        items = Counter(self._database.execute("SELECT id, name, n FROM items"))
        sums = Counter(self._database.execute("SELECT name, sum(n)::bigint, count(*) FROM items GROUP BY name"))
        found = {}
        for name, expected in (("rows", items), ("sums", sums)):
            rows = Counter(self._rows(name))
            found[f"lost {name}"] = sum((expected - rows).values())
            found[f"wrong or doubled {name}"] = sum((rows - expected).values())
        return found

    def await_equal(self, started: Started) -> dict[str, int]:
        """Waits until the tables are right. Returns the differences after the longest wait."""

        def are_equal() -> bool:
            started.drain()
            return not any(self.differences().values())

        self._await(are_equal, None)
        return self.differences()

    def is_cut(self) -> bool:
        """Returns whether the table does not have all rows of the snapshot."""
        return len(self._rows("rows")) < SNAPSHOT_ROWS

    def _rows(self, name: str) -> list[tuple[Any, ...]]:
        path = self.folder / name
        return tg.open_table(str(path)).to_polars().rows() if path.exists() else []

    def _await(self, is_so: Callable[[], bool], what: str | None) -> None:
        end = time.monotonic() + STUCK_S
        while not is_so():
            if time.monotonic() > end:
                if what is None:
                    return
                raise TimeoutError(f"waited {STUCK_S:.0f} s for {what}")
            time.sleep(0.5)


def kill(started: Started, moment: str, random: Random) -> None:
    """Waits for a moment of a process, and ends it with SIGKILL."""
    try:
        if moment == "in the snapshot":
            started.await_notes("end", 1)
            time.sleep(random.random() * 0.15)
        elif moment == "during a checkpoint":
            started.await_notes("begin", random.randrange(1, 8))
            time.sleep(random.random() * 0.05)
        else:
            started.await_notes("end", random.randrange(1, 8))
    finally:
        started.end()


def main() -> int:
    """Kills the job, and prints what was lost or doubled."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kills", nargs="?", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    _FORKS.set_forkserver_preload(list(IMPORTS))
    random = Random(given.seed)
    moments: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    checks = 0
    cut = 0
    with (
        tempfile.TemporaryDirectory(prefix="cdc-kills-") as name,
        run_postgres() as server,
        new_database(server) as database,
    ):
        database.execute("CREATE TABLE items (id bigint PRIMARY KEY, name text, n int)")
        database.execute(f"INSERT INTO items SELECT {KEYS} + i, 'old', i FROM generate_series(1, {SNAPSHOT_ROWS}) i")
        runs = Runs(database, Path(name))
        writer = Writer(database, given.seed)

        def check() -> None:
            started = runs.start()
            try:
                with writer.pause():
                    found = runs.await_equal(started)
            finally:
                started.end()
            totals.update(found)
            if any(found.values()):
                print(f"after {sum(moments.values())} kills: {found}", flush=True)

        try:
            for number in range(given.kills):
                is_first = number % KILLS_A_SLOT == 0
                if is_first and number:
                    runs.begin_anew()
                moment = MOMENTS[2] if is_first else MOMENTS[number % 2]
                kill(runs.start(), moment, random)
                moments[moment] += 1
                cut += is_first and runs.is_cut()
                if (number + 1) % KILLS_A_SLOT == 0 or number + 1 == given.kills:
                    check()
                    checks += 1
                    print(f"{number + 1} kills, {writer.transactions} transactions, {dict(totals)}", flush=True)
        finally:
            writer.stop()
    each = ", ".join(f"{count} {moment}" for moment, count in moments.items())
    print(f"{sum(moments.values())} kills ({each}, {cut} snapshots cut)")
    print(f"{writer.transactions} transactions, tables compared {checks} times: {dict(totals)}")
    return 1 if any(totals.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())

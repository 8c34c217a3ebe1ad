"""Kills of jobs that write Delta and Iceberg tables: nothing may be lost or doubled.

    .venv/bin/python benchmarks/lake_kills.py [--kills 100] [--seed N] [--tables delta-upsert,iceberg-append,...]

A process runs a local job with a checkpoint every 200 ms. It writes each number of a rate to the table. A job that
upserts also writes a stream of changes to a second table: how many of 101 keys have each count, where most rows are
deleted again. SIGKILL ends the process at moments that the seed draws: during a commit, between two commits, and while
the job is restored. The next process restores the latest checkpoint. After each 20 kills the job is stopped with a
savepoint, and the tables must have the numbers up to some row of each split, once each, and the counts of exactly these
numbers. Then the next job begins with new tables. The exit code is 1 if a table is not right.
"""

from __future__ import annotations

import argparse
import faulthandler
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import TypeVar

import pyarrow as pa

TABLES = ("delta-upsert", "iceberg-append", "iceberg-upsert")
KILLS_A_TABLE = 20
STUCK_S = 900.0
"""After this time a process of the job writes where it is, and is killed."""
KEYS = 101
RATE = 2_000
"""Rows a second. From 1,600 on, `from_rate` gives each split every second number."""
SPLITS = 2
T = TypeVar("T")
CONTEXT = multiprocessing.get_context("fork")
DURING, BETWEEN, RESTORING = MOMENTS = ("during a commit", "between commits", "while it is restored")
PRELOADED = ("tidegate.api.environment", "deltalake", "pyiceberg.catalog.sql", "tidegate.connectors.iceberg.manifests")
"""Modules that this process loads and never uses, so that it has no threads when it forks the processes of jobs."""


def job(folder: str, kind: str, catalog: dict[str, str], marks: Connection) -> None:
    """Runs the job in this process. Sends a mark when a commit begins and ends. Stops it when something arrives."""
    import polars as pl

    import tidegate as tg
    from tidegate.connectors.delta.sink import DeltaUpsert
    from tidegate.connectors.iceberg.sink import IcebergAppend, IcebergUpsert

    errors = (Path(folder) / "errors").open("a")
    os.dup2(errors.fileno(), 2)
    faulthandler.dump_traceback_later(STUCK_S - 20)

    def marked(real: Callable[..., None]) -> Callable[..., None]:
        def commit(*arguments: object) -> None:
            marks.send("begin")
            real(*arguments)
            marks.send("end")

        return commit

    for sink in (DeltaUpsert, IcebergAppend, IcebergUpsert):
        sink.commit = marked(sink.commit)  # type: ignore[method-assign]
    env = tg.StreamEnvironment.local(2)
    numbers = env.from_rate(RATE, splits=SPLITS, uid="numbers").select("value")
    if kind == "iceberg-append":
        numbers.to_iceberg(catalog=catalog, table="kills.numbers", create=True, uid="to-numbers")
    else:
        counts = (
            numbers.select(key=pl.col("value") % KEYS)
            .key_by("key")
            .aggregate(n=tg.count(), emit="changes", uid="counts")
        )
        keys = counts.key_by("n").aggregate(keys=tg.count(), emit="changes", uid="keys")
        for name, stream, key in (("numbers", numbers, "value"), ("keys", keys, "n")):
            uid = f"to-{name}"
            if kind == "delta-upsert":
                stream.to_delta(f"{folder}/{name}", mode="upsert", keys=key, uid=uid)
            else:
                stream.to_iceberg(catalog=catalog, table=f"kills.{name}", mode="upsert", keys=key, create=True, uid=uid)
    checkpoints = tg.CheckpointConfig(interval="200ms", storage=f"{folder}/checkpoints")
    running = env.execute("numbers", checkpoints=checkpoints, restore="latest_or_fresh", progress="off")
    marks.recv()
    running.stop(savepoint=f"{folder}/savepoint")
    marks.send("stopped")
    env.close()


class Process:
    """One process of the job."""

    def __init__(self, arguments: tuple[object, ...]) -> None:
        self._marks, other = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=job, args=(*arguments, other), daemon=True)
        self._process.start()
        other.close()

    def next_mark(self) -> str:
        """Waits for a mark. Raises RuntimeError if the process ends, or is stuck."""
        if not self._marks.poll(STUCK_S):
            raise RuntimeError(f"there was no mark for {STUCK_S:g} s")
        try:
            found: str = self._marks.recv()
        except EOFError as error:
            raise RuntimeError("the process has ended by itself") from error
        return found

    def stop(self) -> None:
        """Requests the end of the job."""
        self._marks.send("stop")

    def kill(self) -> list[str]:
        """Kills the process with SIGKILL. Returns the marks that it has sent meanwhile."""
        self._process.kill()
        self._process.join()
        left: list[str] = []
        with suppress(EOFError, ConnectionResetError):
            while True:
                left.append(self._marks.recv())
        return left


class Tables:
    """The tables of one job, and its processes, one after the other."""

    def __init__(self, folder: Path, kind: str) -> None:
        self._folder = folder
        self._kind = kind
        self._catalog = {
            "type": "sql",
            "uri": f"sqlite:///{folder}/catalog.db",
            "warehouse": f"file://{folder}/warehouse",
        }

    @contextmanager
    def process(self) -> Iterator[Process]:
        """Starts a process of the job, which is killed in the end."""
        process = Process((str(self._folder), self._kind, self._catalog))
        try:
            yield process
        finally:
            process.kill()

    def read(self, name: str) -> pa.Table:
        """Returns the rows of a table."""
        if self._kind == "delta-upsert":
            from deltalake import DeltaTable

            return DeltaTable(str(self._folder / name)).to_pyarrow_table()
        from pyiceberg.catalog import load_catalog

        return load_catalog("default", **self._catalog).load_table(f"kills.{name}").scan().to_arrow()

    def commits(self) -> int:
        """Returns how many commits the table of numbers has."""
        if self._kind == "delta-upsert":
            from deltalake import DeltaTable

            return DeltaTable(str(self._folder / "numbers")).version()
        from pyiceberg.catalog import load_catalog

        return len(load_catalog("default", **self._catalog).load_table("kills.numbers").metadata.snapshots)

    def differences(self) -> tuple[int, int, dict[str, int]]:
        """Returns the number of rows, the number of commits, and how many rows are lost, doubled or wrong."""
        values = Counter(self.read("numbers")["value"].to_pylist())
        lost = 0
        for split in range(SPLITS):
            last = max((value for value in values if value % SPLITS == split), default=split)
            lost += sum(1 for value in range(split, last, SPLITS) if value not in values)
        found = {"lost": lost, "doubled": sum(count - 1 for count in values.values())}
        if self._kind != "iceberg-append":
            counts = Counter(value % KEYS for value in values)
            expected = Counter(dict.fromkeys(Counter(counts.values()).items(), 1))
            rows = Counter((row["n"], row["keys"]) for row in self.read("keys").to_pylist())
            found["wrong counts"] = sum((rows - expected).values()) + sum((expected - rows).values())
        return len(values), self.commits(), found

    def errors(self) -> str:
        """Returns the end of what the processes have written as errors."""
        return (self._folder / "errors").read_text()[-4_000:]


def in_child(function: Callable[[], T]) -> T:
    """Calls a function in a process of its own. Raises RuntimeError if that fails."""
    receiver, sender = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=lambda: sender.send(function()))
    process.start()
    sender.close()
    try:
        found: T = receiver.recv()
    except EOFError as error:
        raise RuntimeError("the tables cannot be read") from error
    process.join()
    return found


def kill_once(tables: Tables, random: Random) -> tuple[str, bool]:
    """Kills a process of the job. Returns the moment, and whether a commit was interrupted."""
    moment = random.choices(MOMENTS, (6, 2, 2))[0]
    with tables.process() as process:
        if moment == RESTORING:
            time.sleep(random.uniform(0.1, 1.0))
        else:
            wanted = random.randrange(1, 5)
            seen = 0
            while seen < wanted:
                seen += process.next_mark() == "begin"
            if moment == BETWEEN:
                while process.next_mark() != "end":
                    pass
            time.sleep(random.uniform(0.0, 0.12))
        left = process.kill()
        last = left[-1] if left else {DURING: "begin", BETWEEN: "end", RESTORING: ""}[moment]
        return moment, last == "begin"


def finish(tables: Tables) -> None:
    """Runs a process until it has committed, and stops the job with a savepoint."""
    with tables.process() as process:
        while process.next_mark() != "end":
            pass
        process.stop()
        while process.next_mark() != "stopped":
            pass


def run(kind: str, kills: int, random: Random) -> bool:
    """Kills jobs of one kind. Returns whether all tables were right."""
    moments: Counter[str] = Counter()
    total: Counter[str] = Counter()
    rows = commits = interrupted = done = 0
    began_s = time.monotonic()
    while done < kills:
        with tempfile.TemporaryDirectory(prefix="lake-kills-") as folder:
            tables = Tables(Path(folder), kind)
            try:
                for _ in range(min(KILLS_A_TABLE, kills - done)):
                    moment, in_commit = kill_once(tables, random)
                    moments[moment] += 1
                    interrupted += in_commit
                    done += 1
                finish(tables)
            except RuntimeError:
                print(tables.errors(), flush=True)
                raise
            count, made, found = in_child(tables.differences)
            rows += count
            commits += made
            total.update(found)
            print(f"{kind}: {done} kills, {count} rows, {found}", flush=True)
    when = ", ".join(f"{moments[each]} {each}" for each in MOMENTS)
    seconds = time.monotonic() - began_s
    print(f"{kind}: {done} kills ({when}; {interrupted} interrupted a commit), {seconds:.0f} s", flush=True)
    print(f"{kind}: {rows:,} rows in {commits} commits, {dict(total)}", flush=True)
    return not any(total.values())


def main() -> None:
    """Runs the kinds that were chosen."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100, help="kills for each kind of table")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tables", default=",".join(TABLES))
    given = parser.parse_args()
    kinds = given.tables.split(",")
    if unknown := set(kinds) - set(TABLES):
        parser.error(f"--tables has {sorted(unknown)[0]!r}; give some of {', '.join(TABLES)}")
    for name in PRELOADED:
        import_module(name)
    right = [run(kind, given.kills, Random(given.seed)) for kind in kinds]
    sys.exit(0 if all(right) else 1)


if __name__ == "__main__":
    main()

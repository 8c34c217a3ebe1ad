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
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pyarrow as pa

TABLES = ("delta-upsert", "iceberg-append", "iceberg-upsert")
KILLS_A_TABLE = 20
STUCK_S = 900.0
"""After this time a process of the job writes where it is, and is killed."""
KEYS = 101
SPLITS = 2
DURING, BETWEEN, RESTORING = MOMENTS = ("during a commit", "between commits", "while it is restored")
JOB = """
import faulthandler, json, sys
import polars as pl
import tidegate as tg
from tidegate.connectors.delta.sink import DeltaUpsert
from tidegate.connectors.iceberg.sink import IcebergAppend, IcebergUpsert

folder, table, catalog = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
faulthandler.dump_traceback_later(float(sys.argv[4]))

def marked(real):
    def commit(*arguments):
        print("begin", flush=True)
        real(*arguments)
        print("end", flush=True)
    return commit

for kind in (DeltaUpsert, IcebergAppend, IcebergUpsert):
    kind.commit = marked(kind.commit)

env = tg.StreamEnvironment.local(2)
numbers = env.from_rate(4_000, splits=2, uid="numbers").select("value")
if table == "iceberg-append":
    numbers.to_iceberg(catalog=catalog, table="kills.numbers", create=True, uid="to-numbers")
else:
    keyed = numbers.select(key=pl.col("value") % 101)
    counts = keyed.key_by("key").aggregate(n=tg.count(), emit="changes", uid="counts")
    keys = counts.key_by("n").aggregate(keys=tg.count(), emit="changes", uid="keys")
    for name, stream, key in (("numbers", numbers, "value"), ("keys", keys, "n")):
        if table == "delta-upsert":
            stream.to_delta(folder + "/" + name, mode="upsert", keys=key, uid="to-" + name)
        else:
            stream.to_iceberg(
                catalog=catalog, table="kills." + name, mode="upsert", keys=key, create=True, uid="to-" + name
            )
checkpoints = tg.CheckpointConfig(interval="200ms", storage=folder + "/checkpoints")
job = env.execute("numbers", checkpoints=checkpoints, restore="latest_or_fresh", progress="off")
sys.stdin.readline()
job.stop(savepoint=folder + "/savepoint")
print("stopped", flush=True)
env.close()
"""


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
    def process(self) -> Iterator[subprocess.Popen[str]]:
        """Starts a process of the job, which is killed in the end, or if it is stuck."""
        command = [sys.executable, "-c", JOB, str(self._folder), self._kind, json.dumps(self._catalog)]
        command.append(str(STUCK_S - 20))
        with (self._folder / "errors").open("a") as errors:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=self._folder
            )
        limit = threading.Timer(STUCK_S, process.kill)
        limit.start()
        try:
            yield process
        finally:
            limit.cancel()
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                stream.close()

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

    def differences(self) -> tuple[int, dict[str, int]]:
        """Returns the number of rows, and how many rows are lost, doubled or wrong."""
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
        return len(values), found

    def errors(self) -> str:
        """Returns the end of what the processes have written as errors."""
        return (self._folder / "errors").read_text()[-4_000:]


def lines_of(process: subprocess.Popen[str]) -> Iterator[str]:
    """Yields the marks that a process prints. Raises RuntimeError if it ends."""
    assert process.stdout is not None
    for line in process.stdout:
        yield line.strip()
    raise RuntimeError("the process has ended by itself, or was stuck")


def kill_once(tables: Tables, random: Random) -> tuple[str, bool]:
    """Kills a process of the job. Returns the moment, and whether a commit was interrupted."""
    moment = random.choices(MOMENTS, (6, 2, 2))[0]
    with tables.process() as process:
        marks = lines_of(process)
        if moment == RESTORING:
            time.sleep(random.uniform(0.3, 2.5))
        else:
            wanted = random.randrange(1, 5)
            seen = 0
            while seen < wanted:
                seen += next(marks) == "begin"
            if moment == BETWEEN:
                while next(marks) != "end":
                    pass
            time.sleep(random.uniform(0.0, 0.12))
        process.kill()
        process.wait()
        assert process.stdout is not None
        left = [line.strip() for line in process.stdout]
        last = left[-1] if left else {DURING: "begin", BETWEEN: "end", RESTORING: ""}[moment]
        return moment, last == "begin"


def finish(tables: Tables) -> None:
    """Runs a process until it has committed, and stops the job with a savepoint."""
    with tables.process() as process:
        marks = lines_of(process)
        while next(marks) != "end":
            pass
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        while next(marks) != "stopped":
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
            count, found = tables.differences()
            rows += count
            commits += tables.commits()
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
    right = [run(kind, given.kills, Random(given.seed)) for kind in kinds]
    sys.exit(0 if all(right) else 1)


if __name__ == "__main__":
    main()

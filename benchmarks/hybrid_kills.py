"""A job that reads files and then a topic of Kafka is killed around the switch: is every row there exactly once?

    python benchmarks/hybrid_kills.py [--kills 100] [--seed 1] [--limit 1800]

The broker is the one of the tests, on loopback. A process runs a job on the local runtime: `env.hybrid` of Parquet
files and a topic of three partitions, into a table. The process gets SIGKILL and is started again with
`restore="latest_or_fresh"`, mostly at another parallelism. The seed draws the moment of each kill:

    before    up to 200 ms after one of the last rows of the files
    at        up to 1.3 s after the last row of the files: the second source is given out within a second
    after     up to 300 ms after a row of Kafka

After each few kills the job runs to its end. Then the table must have all rows of both, each once, and another job
begins. Where each kill struck is told by the rows that were processed last.

Exit code 1 if a row is lost or doubled, or the job is stuck. After `--limit` seconds there are no more kills.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from confluent_kafka import Producer
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from kafka_server import run_kafka

import tidegate as tg
from tidegate.storage.files.file_system_store import FileSystemStore
from tidegate.storage.tables.table_files import read_table

FILES, ROWS_A_FILE = 12, 100
FIRST = FILES * ROWS_A_FILE
"""The files have the values up to FIRST, and the topic those from there to ROWS."""
ROWS = FIRST + 2_000
NEAR = FIRST - ROWS_A_FILE
PARTITIONS = 3
TOPIC = "after-files"
KINDS = {"before": 0.2, "at": 1.3, "after": 0.3}
"""For each kind of kill how long after its moment it comes at most, in seconds."""
KILLS_A_JOB = 5
BATCH_S = 0.003
"""Each batch takes this long, so that there are checkpoints on both sides of the switch."""
STUCK_S = 300.0
SCHEMA = pa.schema([("x", pa.int64())])


def run_job(folder: Path, servers: str, parallelism: int, interval: str) -> None:
    """Runs the job to its end. Prints the first value of each batch."""

    def watched(batch: pa.RecordBatch) -> pa.RecordBatch:
        time.sleep(BATCH_S)
        sys.stdout.write(f"{max(batch.column('x').to_pylist())}\n")
        sys.stdout.flush()
        return batch

    options = tg.DataPlaneOptions(source_rows_max=25)
    with tg.StreamEnvironment.local(parallelism, options=options) as env:
        past = env.from_files(str(folder.parent / "past" / "*.parquet"))
        live = env.from_kafka(servers, topics=[TOPIC], value={"x": int}, end="latest")
        rows = env.hybrid(past, then=live, uid="rows").map_batches(watched, schema=SCHEMA, uid="watched")
        rows.to_table(str(folder / "table"), uid="table")
        checkpoints = tg.CheckpointConfig(interval=interval, storage=str(folder / "checkpoints"))
        job = env.execute(
            "kills",
            checkpoints=checkpoints,
            restart=tg.RestartStrategy.none(),
            restore="latest_or_fresh",
            progress="off",
        )
        print(job.wait("4min"), flush=True)


class Process:
    """The process of a job, and the rows that it has processed."""

    def __init__(self, folder: Path, servers: str, rng: random.Random) -> None:
        options = [str(folder), servers, str(rng.choice((1, 2, 3))), rng.choice(("20ms", "60ms", "150ms"))]
        with (folder / "job.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, __file__, "--job", *options], stdout=subprocess.PIPE, stderr=log, text=True
            )
        self._changed = threading.Condition()
        self.values: set[int] = set()
        self.ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._changed:
                if line.strip().isdigit():
                    self.values.add(int(line))
                else:
                    self.ended = line.strip() == "finished"
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def await_moment(self, kind: str) -> None:
        """Waits for the moment of a kill, or a later one if the job is beyond it, or for its end."""
        least = {"before": NEAR, "at": FIRST - 1, "after": FIRST}[kind]
        with self._changed:
            reached = self._changed.wait_for(
                lambda: self.ended or self._process.poll() is not None or any(x >= least for x in self.values), STUCK_S
            )
        if not reached:
            raise TimeoutError(f"no row from {least} on within {STUCK_S:.0f} s")

    def kill(self) -> None:
        """Kills the process. Raises RuntimeError if it has ended by an error before."""
        self._process.kill()
        self._process.wait()
        self._reader.join()

    def finish(self) -> None:
        """Waits for the end of the job. Raises RuntimeError if it failed, and TimeoutError."""
        self._process.wait(STUCK_S)
        self._reader.join()
        if not self.ended:
            raise RuntimeError("the job has failed")

    @property
    def failed(self) -> bool:
        """Returns whether the process has ended by itself, before the job was over."""
        return self._process.poll() is not None and not self.ended


@contextmanager
def inputs(folder: Path) -> Iterator[str]:
    """Writes the files and the topic. Yields the address of the broker."""
    (folder / "past").mkdir()
    (folder / "kafka").mkdir()
    for number in range(FILES):
        values = range(number * ROWS_A_FILE, (number + 1) * ROWS_A_FILE)
        pq.write_table(pa.table({"x": pa.array(values, pa.int64())}), folder / "past" / f"{number:02}.parquet")
    with run_kafka(folder / "kafka") as server:
        server.create(TOPIC, PARTITIONS)
        producer = Producer({"bootstrap.servers": server.servers, "log_level": 0})
        for value in range(FIRST, ROWS):
            producer.produce(TOPIC, json.dumps({"x": value}).encode(), partition=value % PARTITIONS)
        assert producer.flush(60) == 0
        yield server.servers


def kill_one_job(folder: Path, servers: str, rng: random.Random, kills: int, seen: Counter[str]) -> int:
    """Kills a job up to this often, and lets it end. Returns the number of kills."""
    folder.mkdir()
    done = 0
    while True:
        process = Process(folder, servers, rng)
        if done < kills:
            kind = rng.choice(tuple(KINDS))
            process.await_moment(kind)
            time.sleep(rng.random() * KINDS[kind])
            if process.failed:
                raise RuntimeError("the job has failed")
            if not process.ended:
                process.kill()
                done += 1
                newest = max(process.values, default=-1)
                seen["in the files" if newest < FIRST - 1 else "at the switch" if newest < FIRST else "in Kafka"] += 1
                continue
        process.finish()
        return done


def check(folder: Path) -> tuple[int, int]:
    """Returns how many rows of the table are lost, and how many are doubled."""
    found = Counter(read_table(FileSystemStore(str(folder / "table")))["x"].to_pylist())
    lost = sum(value not in found for value in range(ROWS))
    return lost, sum(found.values()) - len(found) + sum(value not in range(ROWS) for value in found)


def main() -> int:
    """Kills jobs, and returns the exit code."""
    if sys.argv[1:2] == ["--job"]:
        place, servers, parallelism, interval = sys.argv[2:]
        run_job(Path(place), servers, int(parallelism), interval)
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=1800.0)
    options = parser.parse_args()
    console = Console(width=120)
    rng = random.Random(options.seed)
    folder = Path(tempfile.mkdtemp(prefix="hybrid-kills-"))
    seen = Counter[str]()
    kills = jobs = lost = doubled = 0
    begun_s = time.monotonic()
    with inputs(folder) as servers:
        while kills < options.kills and time.monotonic() - begun_s < options.limit:
            wanted = min(rng.randint(1, 2 * KILLS_A_JOB - 1), options.kills - kills)
            job_folder = folder / f"job-{jobs}"
            kills += kill_one_job(job_folder, servers, rng, wanted, seen)
            jobs += 1
            missing, extra = check(job_folder)
            lost += missing
            doubled += extra
            where = ", ".join(f"{count} {place}" for place, count in sorted(seen.items()))
            console.print(f"{kills} kills of {jobs} jobs ({where}): {lost} rows lost, {doubled} doubled")
            if missing or extra:
                console.print(f"see {job_folder}")
                return 1
            shutil.rmtree(job_folder)
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())

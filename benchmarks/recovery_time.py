"""How long after `kill -9` of a task's process the job processes rows again, with a spare process and without.

    python benchmarks/recovery_time.py [--kills 10] [--interval 500ms]
    python benchmarks/recovery_time.py --state-gb 1 [--cases local warm reading no-spare s3 rocksdb] [--interval 10s]

A keyed job on Ray reads an endless, generated source as fast as the machine allows and takes a checkpoint every
`--interval`. Again and again, right after a new checkpoint and as soon as the spare process is up, the process of a
randomly chosen task is killed (SIGKILL); the restart delay is 0 ms. The clock starts before the signal. It stops when
the driver, which asks every 5 ms, is told that the new attempt has taken in a row. The coordinator's own log tells the
parts of that time:

    detect    from the signal until the coordinator knew of the loss
    deploy    until all tasks had been given to processes anew
    restore   until the last task had its state back from the checkpoint
    first row until the first rows had come into a task behind the sources, in the new attempt

With `--state-gb` the job keeps that much keyed state, a count and eleven sums for each key (104 bytes), incrementally.
The first kill waits until nearly all keys have come, and the victims are keyed tasks. The clock that counts is then the
one that stops when keyed rows flow. The cases:

    local     columnar backend, one spare process, local copies, 2 GB for survivors
    warm      the same, and a spare process for each keyed task that holds its state (`standbys="warm"`): the kill waits
              until it has read the new checkpoint, a whole one where most rows have changed
    reading   as local, but survivors read too (`rewind_memory=0`)
    no-spare  as local, without a spare process
    s3        one spare process, no local copies, state on a real S3 server (SeaweedFS on this machine)
    rocksdb   RocksDB's own files, one spare process, local copies
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import re
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import ray
from common import GeneratedSource, describe_machine, kill, local_ray
from rich.console import Console
from rich.table import Table

import tidegate as tg
from tidegate.actors.drivers.job_context import Standbys
from tidegate.actors.ray.actor_calls import NAMESPACE
from tidegate.actors.ray.ray_runtime import RayJob, RayRuntime
from tidegate.actors.ray.task_deployment import ProcessStatus
from tidegate.storage.clock import now_ms

SOURCE, TOTALS = "rows", "totals"
PARALLELISM = 2
ENDLESS_ROWS = 10**13
POLL_S = 0.005
WAIT_TIMEOUT_S = 120.0
SUMS = 11
KEY_BYTES = 8 * (2 + SUMS)
"""With --state-gb: the key, its count, and its sums."""
FILL_ROWS = 5
"""Rows for each key before the first kill: of keys that are drawn evenly all but 0.7 % have come then."""
FILL_TIMEOUT_S = 900.0
PARTS = ("detect", "deploy", "restore", "first row")

_STAMP = r"(?P<stamp>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) .*?"
_FIRST_ROWS = (
    _STAMP + r"attempt (?P<attempt>\d+): the first rows came into \S+ (?P<since_deploy>\d+) ms after its deployment, "
    r"(?P<since_failure>\d+) ms after the failure"
)
_READY = re.compile(
    r"task .* is ready(?: with its state from (?P<origin>[a-z ]+))?, (?P<since_failure>\d+) ms after the failure"
)


sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
_SEAWEED: Any = importlib.import_module("seaweed")
"""The S3 server is that of the tests."""


@dataclass(frozen=True, slots=True)
class Case:
    """How a job is run that is killed."""

    name: str
    standbys: Standbys = 1
    copies: bool = False
    s3: bool = False
    backend: Literal["columnar", "rocksdb"] = "columnar"
    rewind_memory: int = 256 * 1024 * 1024


CASES = {
    case.name: case
    for case in (
        # Nearly every row changes between two checkpoints: with less memory survivors would read. While the next one is
        # being written they do so with any.
        Case("local", copies=True, rewind_memory=2 * 1024**3),
        Case("warm", standbys="warm", copies=True, rewind_memory=2 * 1024**3),
        Case("reading", copies=True, rewind_memory=0),
        Case("no-spare", standbys=0, copies=True),
        Case("s3", s3=True),
        Case("rocksdb", copies=True, backend="rocksdb"),
    )
}


@dataclass(frozen=True, slots=True)
class Recovery:
    """One kill. All times in ms since the signal, except `parts`, which follow one another."""

    victim: str
    """Task and process."""
    first_row_ms: int
    """As the driver saw it."""
    keyed_rows_ms: int
    """Until rows had come over a channel into the keyed vertex, as the driver saw it."""
    parts: tuple[int, ...] | None
    """As the coordinator's log says; None where it does not."""
    origins: tuple[str, ...] = ()
    """Where each task with state had it from."""


class Measurement:
    """One job that is killed and followed."""

    def __init__(self, job: RayJob, logs: Path, standbys: Standbys, rng: random.Random, keyed_victims: bool) -> None:
        self._job = job
        self._logs = logs
        # Without a reservation "auto" is one; "warm" adds one for each keyed task.
        self._standbys = standbys if isinstance(standbys, int) else 1 + PARALLELISM
        self._warm = standbys == "warm"
        self._rng = rng
        self._keyed_victims = keyed_victims
        self._seen_checkpoints = 0

    def fill(self, rows: int) -> None:
        """Wait until the keyed tasks have taken in so many rows. Raises TimeoutError."""
        self._until("the state", lambda progress: progress.rows_in.get(TOTALS, 0) >= rows, FILL_TIMEOUT_S)

    def kill_once(self) -> Recovery:
        """Wait for a new checkpoint (and the spare process), kill, follow. Raises TimeoutError after two minutes."""
        before = self._until("a new checkpoint", self._is_steady)
        if self._standbys:
            self._until("the spare process", lambda _: self._job.standbys() == self._standbys)
            # The checkpoint is to be as young as without waiting for a process.
            self._seen_checkpoints = self._job.progress().completed_checkpoints
            before = self._until("a new checkpoint", self._is_steady)
        if self._warm:
            newest = before.last_checkpoint or 0
            before = self._until("its state in spare processes", lambda _: self._held() >= newest)
        attempt = before.attempt + 1
        tasks = self._job.tasks()
        victim = self._rng.choice([t for t in tasks if t.task.vertex == TOTALS] if self._keyed_victims else tasks)
        killed_at_ms = kill(victim.pid)
        after = self._until("the first row", lambda p: p.attempt >= attempt and any(p.rows_in.values()))
        first_row_ms = now_ms() - killed_at_ms
        after = self._until("keyed rows", lambda p: p.attempt >= attempt and p.rows_in.get(TOTALS, 0) > 0)
        keyed_rows_ms = now_ms() - killed_at_ms
        self._seen_checkpoints = after.completed_checkpoints
        parts, origins = self._logged(attempt, killed_at_ms)
        return Recovery(f"{victim.task} in {victim.actor}", first_row_ms, keyed_rows_ms, parts, origins)

    def _held(self) -> int:
        """The checkpoint whose state all followers of keyed tasks hold at least; 0 for none."""
        prefix = f"{self._job.name}/standby#"
        names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
        asked = [ray.get_actor(name, NAMESPACE).held.remote() for name in names if name.startswith(prefix)]
        answers: list[ProcessStatus] = ray.get(asked)
        held = [number or 0 for one in answers if not one.tasks for number in one.follows.values()]
        return min(held) if len(held) == PARALLELISM else 0

    def _is_steady(self, progress: tg.JobProgress) -> bool:
        return (
            progress.status == "running"
            and progress.completed_checkpoints > self._seen_checkpoints
            and progress.rows_in.get(TOTALS, 0) > 0
        )

    def _until(
        self, what: str, condition: Callable[[tg.JobProgress], bool], timeout_s: float = WAIT_TIMEOUT_S
    ) -> tg.JobProgress:
        deadline = time.monotonic() + timeout_s
        while True:
            progress = self._job.progress()
            if condition(progress):
                return progress
            if progress.status == "failed" or time.monotonic() > deadline:
                raise TimeoutError(f"waited in vain for {what}: {progress}")
            time.sleep(POLL_S)

    def _logged(self, attempt: int, killed_at_ms: int) -> tuple[tuple[int, ...] | None, tuple[str, ...]]:
        """What the coordinator's log says about the recovery that ended with this attempt: parts, origins of state."""
        pid = self._job.coordinator().pid
        lines = [line for path in self._logs.glob(f"worker-*-{pid}.err") for line in path.read_text().splitlines()]
        ready_ms = 0
        origins: list[str] = []
        for line in lines:
            if (ready := _READY.search(line)) is not None:
                ready_ms = max(ready_ms, int(ready["since_failure"]))
                origins += [ready["origin"]] if ready["origin"] else []
            elif (first := re.search(_FIRST_ROWS, line)) is not None:
                if int(first["attempt"]) == attempt:
                    at_ms = int(datetime.strptime(first["stamp"], "%Y-%m-%d %H:%M:%S,%f").timestamp() * 1000)
                    end_ms = int(first["since_failure"])
                    deployed_ms = end_ms - int(first["since_deploy"])
                    detect_ms = at_ms - end_ms - killed_at_ms
                    return (detect_ms, deployed_ms, ready_ms - deployed_ms, end_ms - ready_ms), tuple(origins)
                ready_ms = 0
                origins = []
        return None, ()


def measure(case: Case, arguments: argparse.Namespace, logs: Path, console: Console) -> list[Recovery]:
    """Kill one job so many times; prints each recovery."""
    folder = (arguments.folder / case.name.replace("=", "-")).resolve()
    shutil.rmtree(folder, ignore_errors=True)
    runtime = RayRuntime(standbys=case.standbys)
    options = tg.DataPlaneOptions(source_rows_max=arguments.batch_rows)
    env = tg.StreamEnvironment(runtime, PARALLELISM, options=options)
    large = arguments.state_gb is not None
    keys = int(arguments.state_gb * 1e9 / KEY_BYTES) if large else arguments.keys
    rows = env.from_source(GeneratedSource(ENDLESS_ROWS, keys, PARALLELISM), name=SOURCE, uid=SOURCE)
    if large:
        sums: dict[str, Any] = {f"s{number}": tg.sum("value") for number in range(SUMS)}
    else:
        sums = {"total": tg.sum("value"), "worst": tg.max("value")}
    keyed = rows.key_by("key")
    totals = keyed.aggregate(emit="final", name=TOTALS, uid=TOTALS, parallelism=PARALLELISM, n=tg.count(), **sums)
    totals.to_table(str(folder / "table"), uid="table")
    copies: dict[str, Any] = {"local_copies": True, "local_directory": str(folder / "copies")} if case.copies else {}
    name = f"recovery-{case.name}"
    submission = env.plan(
        name,
        checkpoints=tg.CheckpointConfig(
            interval=arguments.interval,
            timeout="10min",
            storage=f"s3://{_SEAWEED.BUCKET}/{name}" if case.s3 else str(folder / "checkpoints"),
            backend=case.backend,
            rewind_memory=case.rewind_memory,
            incremental=large and case.backend == "columnar",
            **copies,
        ),
        restart=tg.RestartStrategy.fixed_delay(attempts=1_000, delay=0),
    )
    recoveries = []
    try:
        rng = random.Random(arguments.seed)
        measurement = Measurement(runtime.submit(submission), logs, case.standbys, rng, large)
        if large:
            measurement.fill(FILL_ROWS * keys)
        for number in range(1, arguments.kills + 1):
            recovery = measurement.kill_once()
            recoveries.append(recovery)
            console.print(
                f"{case.name}, kill {number:2}: {recovery.first_row_ms:5} ms to the first row, "
                f"{recovery.keyed_rows_ms:5} ms to keyed rows; {_in_words(recovery.parts)}; "
                f"state from {', '.join(recovery.origins) or 'nowhere'}; killed {recovery.victim}",
                highlight=False,
                soft_wrap=True,
            )
    finally:
        runtime.stop()
        shutil.rmtree(folder, ignore_errors=True)
    return recoveries


def show(results: dict[str, list[Recovery]], console: Console) -> None:
    """Median, least and most of each figure, a column for each case."""
    table = Table(title="ms after kill -9: median (least to most)")
    table.add_column("")
    for name, recoveries in results.items():
        table.add_column(f"{name}, {len(recoveries)} kills", justify="right")
    columns = list(results.values())
    known = [[recovery.parts for recovery in column if recovery.parts is not None] for column in columns]
    for index, part in enumerate(PARTS):
        table.add_row(f"  {part}", *(_spread([parts[index] for parts in column]) for column in known))
    table.add_section()
    table.add_row("[bold]first row, as the driver saw it", *(_spread([r.first_row_ms for r in c]) for c in columns))
    table.add_row("rows over a channel, likewise", *(_spread([r.keyed_rows_ms for r in c]) for c in columns))
    console.print(table)


def _spread(values: list[int]) -> str:
    return f"{statistics.median(values):.0f} ({min(values)} to {max(values)})" if values else "not told"


def _in_words(parts: tuple[int, ...] | None) -> str:
    if parts is None:
        return "the coordinator's log does not tell the parts"
    return ", ".join(f"{name} {part_ms}" for name, part_ms in zip(PARTS, parts, strict=True))


def main() -> int:
    """Measure with the default of one spare process, then without any; or the cases of a large state."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10, help="kills of each job (default 10)")
    parser.add_argument("--standbys", type=int, nargs="+", default=[1, 0], help="one job for each (default 1 0)")
    parser.add_argument(
        "--state-gb", type=float, help="keyed state of this size, in the cases; without --standbys, --keys"
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="one job for each")
    parser.add_argument("--interval", default="500ms", help="time between checkpoints (default 500ms)")
    parser.add_argument("--keys", type=int, default=100_000, help="distinct keys in the state (default 100,000)")
    parser.add_argument("--batch-rows", type=int, default=65_536, help="rows of a batch (default 65,536)")
    parser.add_argument("--seed", type=int, default=1, help="decides the victims (default 1)")
    parser.add_argument("--folder", type=Path, default=Path(".bench/recovery"), help="where files go")
    arguments = parser.parse_args()
    console = Console()
    describe_machine(console)
    cases = [Case(f"standbys={standbys}", standbys) for standbys in arguments.standbys]
    if arguments.state_gb is not None:
        cases = [CASES[name] for name in arguments.cases]
    with ExitStack() as stack:
        if any(case.s3 for case in cases):
            # A server that finds the files of one that was killed, on other ports, does not come up.
            folder = arguments.folder.resolve() / "server"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            server = stack.enter_context(_SEAWEED.run_seaweed(folder))
            os.environ |= {
                "AWS_DEFAULT_REGION": "us-east-1",
                "AWS_ACCESS_KEY_ID": str(server.options["key"]),
                "AWS_SECRET_ACCESS_KEY": str(server.options["secret"]),
                "AWS_ENDPOINT_URL": str(server.endpoint_url),
            }
        logs = stack.enter_context(local_ray())
        results = {case.name: measure(case, arguments, logs, console) for case in cases}
    show(results, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())

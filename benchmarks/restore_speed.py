"""How fast, and in how much memory, one task takes its keyed state back, beside the floor of the machine.

    python benchmarks/restore_speed.py [--state-mb 500] [--layers 1] [--rounds 3] [--key string] [--s3]

A keyed aggregate (a count and eleven sums for each key: 104 bytes with an integer key) is filled through the operators
of a task, its snapshots are written as a task writes them, to checkpoint storage and to local copies, and then a fresh
process takes the state back by the code that a task runs: `TaskEffects.restore`, then `OperatorChain.open`. With more
layers each one above the base has changed one percent of the keys. The clock does not count what is paid once by a
process: a small state is restored before, so that kernels are loaded.

    read       files of the disk (or ranges from S3)      summed over threads
    checksum   of what was read                           likewise
    decode     from chunks to columns                     likewise
    index      from keys to slots                         on a thread of its own, beside the rest
    rest       copying into columns, hashing keys, and Python

The floor is measured in the same process afterwards: the same files read into one buffer that is used again, their
checksum, a copy of as many bytes into new memory, and one call of the kernel that upserts all keys into an empty index.
Memory is what the process has beyond what it had before, at its peak and at the end (without pages of mapped files).
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from common import describe_machine
from rich.console import Console
from rich.table import Table

import tidegate as tg
from tidegate.actors.coordinator.job_spec import RestorePoint
from tidegate.actors.drivers.job_context import DataPlaneOptions, JobContext
from tidegate.actors.drivers.task_effects import StateStores, TaskEffects, write_snapshot
from tidegate.actors.graph.job_graph import JobEdge, JobGraph, JobVertex, OperatorSpec, SourceSpec
from tidegate.actors.task import events as ev
from tidegate.actors.task import instructions as do
from tidegate.actors.task.incremental_base import IncrementalBase
from tidegate.actors.task.operator_chain import OperatorChain
from tidegate.connectors.memory_source import MemorySource
from tidegate.operators.aggregates.keyed_aggregate import KeyedAggregate
from tidegate.protocol.edges import Partitioning, PartitioningKind
from tidegate.protocol.identity import TaskId
from tidegate.state.common.options import StateBackendOptions
from tidegate.state.kernels.hashing import hash_columns
from tidegate.state.key_index.key_index import KeyIndex
from tidegate.storage.checkpoints.metadata import (
    METADATA_VERSION,
    CheckpointMetadata,
    SubtaskState,
    create_metadata,
    read_metadata,
)
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.ids import AttemptNumber, CheckpointId, JobId, OperatorUid, SubtaskIndex, VertexId
from tidegate.storage.state.local_copies import PrivateFolder
from tidegate.storage.state.snapshot import Cut

SUMS = 11
PARALLELISM = 2
MAX_PARALLELISM = 128
ROW_BYTES = 8 * (2 + SUMS)
BATCH_ROWS = 65_536
WARM_KEYS = 20_000
CHANGED_SHARE = 100
"""One key of so many changes from layer to layer."""
BUCKET = "tidegate-tests"
TIMEOUT_S = 600
UID, VERTEX = OperatorUid("totals"), VertexId("totals")
TASK = TaskId(VERTEX, SubtaskIndex(0))
WATCHED = (
    ("read", "tidegate.storage.files.local_files", "LocalFiles.read"),
    ("read", "tidegate.storage.files.s3_files", "S3Files.read"),
    ("checksum", "tidegate.storage.state.state_file", "checksum_of"),
    ("decode", "tidegate.storage.state.state_file", "decode_chunk"),
    ("index", "tidegate.state.key_index.key_index", "KeyIndex.upsert"),
    ("index", "tidegate.state.key_index.key_index", "KeyIndex.fill"),
)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))


@dataclass
class Restored:
    """One restore. Times in ms, memory in bytes."""

    read_state_ms: float
    """`TaskEffects.restore`."""
    open_ms: float
    """`OperatorChain.open`."""
    parts_ms: dict[str, float]
    floor_ms: dict[str, float]
    state_bytes: int
    peak_bytes: int
    end_bytes: int


@dataclass
class Clock:
    """Adds up what some functions take: of the wall's time, or with `cpu` of the processor's (of this process)."""

    cpu: bool
    spent_s: dict[str, float] = field(default_factory=dict)

    def now_s(self) -> float:
        """What time it is for all threads together."""
        return time.process_time() if self.cpu else time.perf_counter()

    def thread_s(self) -> float:
        """What time it is for this thread."""
        return time.thread_time() if self.cpu else time.perf_counter()

    def watch(self, part: str, owner: Any, name: str) -> None:
        """Time a function from now on, wherever `owner` has it."""
        function: Callable[..., Any] = getattr(owner, name)
        self.spent_s.setdefault(part, 0.0)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start_s = self.thread_s()
            try:
                return function(*args, **kwargs)
            finally:
                self.spent_s[part] += self.thread_s() - start_s

        setattr(owner, name, timed)


def batches(keys: int, every: int, key_type: str) -> Iterator[pa.RecordBatch]:
    """Rows of the keys of subtask 0, about `keys` of them; of these each `every`-th one."""
    own = 0
    schema = pa.schema([("key", pa.int64()), *((f"v{number}", pa.float64()) for number in range(SUMS))])
    for start in range(0, 2**62, BATCH_ROWS):
        if own >= keys:
            return
        numbers = np.arange(start, start + BATCH_ROWS, dtype=np.int64) * 7_919
        column = pa.array(numbers)
        if key_type == "string":
            column = pa.array([f"customer-{number:012d}" for number in numbers.tolist()])
            schema = schema.set(0, pa.field("key", pa.string()))
        values = pa.array((numbers % 1_000).astype(np.float64))
        batch = pa.RecordBatch.from_arrays([column, *[values] * SUMS], schema=schema)
        groups = hash_columns(batch, ("key",)) % np.uint64(MAX_PARALLELISM)
        mine = np.flatnonzero(groups * np.uint64(PARALLELISM) // np.uint64(MAX_PARALLELISM) == 0)[: keys - own]
        own += len(mine)
        yield batch.take(pa.array(mine[::every]))


def context_of(root: str, folder: Path, name: str, arguments: argparse.Namespace) -> JobContext:
    """The job, as its tasks see it; `root` is its checkpoint storage."""
    schema = next(batches(1, 1, arguments.key)).schema
    sums = {f"s{position}": tg.sum(f"v{position}") for position in range(SUMS)}
    operator = OperatorSpec(UID, "totals", partial(KeyedAggregate, ("key",), {"n": tg.count(), **sums}, "final"))
    source = SourceSpec(OperatorUid("rows"), "rows", MemorySource(schema.empty_table(), 1))
    vertices = (
        JobVertex(VertexId("rows"), "rows", 1, (), source),
        JobVertex(VERTEX, "totals", PARALLELISM, (operator,), None),
    )
    edge = JobEdge(0, VertexId("rows"), VERTEX, Partitioning(PartitioningKind.HASH, ("key",)))
    graph = JobGraph(vertices, (edge,), MAX_PARALLELISM)
    options = DataPlaneOptions(
        backend=StateBackendOptions(incremental=True), local_copies=None if arguments.s3 else str(folder / "copies")
    )
    return JobContext(JobId(f"{name}-1a2b3c4d"), name, root, graph, {}, options)


def chain_of(context: JobContext, threads: int = 1) -> OperatorChain:
    """The operators of the task, not yet open; so many threads take their state in."""
    task = context.describe(TASK, AttemptNumber(0))
    place = TASK.subtask, task.parallelism, task.max_parallelism
    return OperatorChain(task.operators, *place, lambda _: None, backend=replace(task.backend, restore_threads=threads))


def build(context: JobContext, keys: int, arguments: argparse.Namespace) -> None:
    """Fill the state, and write checkpoint after checkpoint as a task does."""
    chain = chain_of(context)
    chain.open({})
    copies = context.options.local_copies
    stores = StateStores(context, TASK, open_store, 0, None if copies is None else PrivateFolder(copies))
    part: SubtaskState | None = None
    for number in range(1, arguments.layers + 1):
        checkpoint_id = CheckpointId(number)
        for batch in batches(keys, 1 if number == 1 else CHANGED_SHARE, arguments.key):
            chain.process(batch)
        base = None if part is None else IncrementalBase.of(CheckpointId(number - 1), part)
        cut = Cut(checkpoint_id, None if base is None else base.checkpoint_id)
        persist = do.PersistSnapshot(checkpoint_id, tuple(chain.snapshot(cut)), (), (), base)
        written = write_snapshot(stores.to_write(checkpoint_id), context, TASK, persist)
        layers = (*(() if part is None else part.layers), *(() if written.layer is None else (written.layer,)))
        part = SubtaskState(VERTEX, SubtaskIndex(0), written.handle, layers=layers)
        others = tuple(SubtaskState(task.vertex, task.subtask, None) for task in context.graph.tasks() if task != TASK)
        metadata = CheckpointMetadata(
            METADATA_VERSION,
            context.job_id,
            context.job_name,
            checkpoint_id,
            AttemptNumber(0),
            0,
            context.graph.operator_infos(),
            (part, *others),
        )
        create_metadata(open_store(context.root), metadata)


def restore(context: JobContext, arguments: argparse.Namespace, clock: Clock) -> tuple[OperatorChain, float, float]:
    """The task with its state, and how long both halves of the restore took (s)."""
    descriptor = context.describe(TASK, AttemptNumber(1))
    effects = TaskEffects(context, descriptor, open_store, lambda: 0, arguments.readers)
    start_s = clock.now_s()
    event = effects.restore(RestorePoint(context.root, context.job_id, CheckpointId(arguments.layers), False))
    read_s = clock.now_s() - start_s
    assert isinstance(event, ev.TaskRestored), event
    chain = chain_of(context, arguments.readers)
    chain.open(dict(event.tables))
    return chain, read_s, clock.now_s() - start_s - read_s


def measure(context: JobContext, warm: JobContext, arguments: argparse.Namespace) -> Restored:
    """One restore in this process, which has done nothing else, and the floor."""
    clock = Clock(arguments.cpu)
    restore(warm, arguments, clock)[0].close()
    gc.collect()
    gc.freeze()  # as the process of a task does when it has warmed up
    watch(clock)
    before = memory()
    Path("/proc/self/clear_refs").write_text("5")
    chain, read_s, open_s = restore(context, arguments, clock)
    peak_bytes, end_bytes = memory("VmHWM") - before, memory() - before
    spent_ms = {part: seconds * 1000 for part, seconds in clock.spent_s.items()}
    spent_ms["rest"] = max(0.0, (read_s + open_s) * 1000 - sum(spent_ms.values()))  # of threads times add up
    operator: Any = chain.links[0].operator
    keys = pa.concat_batches([columns for columns, _ in operator._table.scan(BATCH_ROWS)])
    state_bytes = keys.nbytes + keys.num_rows * (ROW_BYTES - 8)
    chain.close()
    del chain, operator
    return Restored(
        read_s * 1000,
        open_s * 1000,
        spent_ms,
        floor(context, keys, arguments, clock),
        state_bytes,
        peak_bytes,
        end_bytes,
    )


def watch(clock: Clock) -> None:
    """Time what the parts of a restore are made of."""
    for part, module, name in WATCHED:
        owner: Any = importlib.import_module(module)
        *path, last = name.split(".")
        for step in path:
            owner = getattr(owner, step, None)
        if owner is not None and hasattr(owner, last):  # older versions lack some
            clock.watch(part, owner, last)


def floor(context: JobContext, keys: pa.RecordBatch, arguments: argparse.Namespace, clock: Clock) -> dict[str, float]:
    """What no restore can do without, each on its own (ms)."""
    store = open_store(context.root)
    metadata = read_metadata(store, context.job_id, CheckpointId(arguments.layers))
    handles = [handle for subtask in metadata.subtasks for handle in subtask.layers]
    size_bytes = sum(handle.size_bytes for handle in handles)
    found = {"read": 0.0, "checksum": 0.0}
    if not arguments.s3:
        buffer = bytearray(1 << 20)
        for handle in handles:
            with open(f"{context.root}/{handle.path}", "rb", buffering=0) as file:
                while True:
                    start_s = clock.now_s()
                    length = file.readinto(buffer)
                    read_s = clock.now_s()
                    if not length:
                        break
                    xxhash.xxh3_64_intdigest(memoryview(buffer)[:length])
                    found["read"] += (read_s - start_s) * 1000
                    found["checksum"] += (clock.now_s() - read_s) * 1000
    else:
        start_s = clock.now_s()
        for handle in handles:
            assert handle.path is not None
            store.read(handle.path)
        found["read"] = (clock.now_s() - start_s) * 1000
    source, target = np.ones(1 << 20, dtype=np.uint8), np.empty(size_bytes, dtype=np.uint8)
    start_s = clock.now_s()
    for start in range(0, size_bytes - len(source), len(source)):
        target[start : start + len(source)] = source
    found["copy"] = (clock.now_s() - start_s) * 1000
    del target
    index = KeyIndex(tuple(keys.schema.names))
    start_s = clock.now_s()
    index.upsert(keys)
    found["index"] = (clock.now_s() - start_s) * 1000
    return found


def memory(figure: str = "VmRSS") -> int:
    """Resident bytes of this process: now, or with `VmHWM` at the peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{figure}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"the kernel does not tell {figure}")


def show(runs: list[Restored], arguments: argparse.Namespace, console: Console) -> None:
    """Medians."""

    def median(figure: Callable[[Restored], float]) -> float:
        return statistics.median(figure(run) for run in runs)

    state_bytes, clock = runs[0].state_bytes, "time of the processor" if arguments.cpu else "time"
    table = Table(title=f"{state_bytes / 1e6:.0f} MB in {arguments.layers} layers, {arguments.key} keys, {clock}")
    table.add_column("")
    table.add_column("restore, ms", justify="right")
    table.add_column("floor, ms", justify="right")
    for part in runs[0].parts_ms:
        floor_ms = median(lambda run, part=part: run.floor_ms.get(part, 0.0))  # type: ignore[misc]
        table.add_row(part, f"{median(lambda run, part=part: run.parts_ms[part]):.0f}", f"{floor_ms:.0f}")  # type: ignore[misc]
    table.add_row("copy", "in the rest", f"{median(lambda run: run.floor_ms['copy']):.0f}")
    total_ms = median(lambda run: run.read_state_ms + run.open_ms)
    floor_ms = median(lambda run: sum(run.floor_ms.values()))
    halves = f"{median(lambda run: run.read_state_ms):.0f} + {median(lambda run: run.open_ms):.0f}"
    table.add_row("all: reading state + opening operators", f"{halves} = {total_ms:.0f}", f"{floor_ms:.0f}")
    table.add_row("against the floor", f"{total_ms / floor_ms:.2f}", "")
    table.add_row(
        "memory at the peak, against the state", f"{median(lambda run: run.peak_bytes) / state_bytes:.2f}", ""
    )
    table.add_row("memory at the end", f"{median(lambda run: run.end_bytes) / state_bytes:.2f}", "")
    console.print(table)


def main() -> int:
    """Build once, restore in fresh processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state-mb", type=int, default=500, help="state of the one task (default 500)")
    parser.add_argument("--layers", type=int, default=1, help="the base and what lies on it (default 1)")
    parser.add_argument("--rounds", type=int, default=3, help="restores (default 3)")
    parser.add_argument("--key", choices=("integer", "string"), default="integer")
    parser.add_argument("--readers", type=int, default=4, help="threads of the restore (default 4, as on Ray)")
    parser.add_argument("--cpu", action="store_true", help="time of the processor, for a machine that is busy")
    parser.add_argument("--s3", action="store_true", help="from SeaweedFS on this machine, without local copies")
    parser.add_argument("--folder", type=Path, default=Path(".bench/restore-speed"), help="where files go")
    parser.add_argument("--phase", choices=("build", "restore"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    folder = arguments.folder = arguments.folder.resolve()
    root = f"s3://{BUCKET}/speed" if arguments.s3 else str(folder / "checkpoints")
    state, warm = (context_of(root, folder, name, arguments) for name in ("state", "warm"))
    if arguments.phase == "build":
        build(warm, WARM_KEYS, arguments)
        build(state, arguments.state_mb * 1_000_000 // ROW_BYTES, arguments)
        return 0
    if arguments.phase == "restore":
        print(json.dumps(asdict(measure(state, warm, arguments))))
        return 0
    console = Console()
    describe_machine(console)
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "s3").mkdir(parents=True)
    runs = []
    with ExitStack() as stack:
        if arguments.s3:
            seaweed: Any = importlib.import_module("seaweed")
            server = stack.enter_context(seaweed.run_seaweed(folder / "s3"))
            os.environ |= {
                "AWS_DEFAULT_REGION": "us-east-1",
                "AWS_ACCESS_KEY_ID": str(server.options["key"]),
                "AWS_SECRET_ACCESS_KEY": str(server.options["secret"]),
                "AWS_ENDPOINT_URL": str(server.endpoint_url),
            }
        phase(["--phase", "build"])
        for _ in range(arguments.rounds):
            runs.append(Restored(**json.loads(phase(["--phase", "restore"]).splitlines()[-1])))
            console.print(runs[-1], highlight=False, soft_wrap=True)
    shutil.rmtree(folder, ignore_errors=True)
    show(runs, arguments, console)
    return 0


def phase(arguments: list[str]) -> str:
    """This script again, in a fresh process; what it printed."""
    return subprocess.run(
        [sys.executable, *sys.argv, *arguments], check=True, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S
    ).stdout


if __name__ == "__main__":
    sys.exit(main())

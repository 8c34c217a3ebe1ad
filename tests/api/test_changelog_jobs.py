"""Jobs whose changes of state are written all the time: what lies there, what goes, and what is restored."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from local_jobs import NO_RESTART, GatedSource, opening
from waiting import until

import tidegate as tg
from tidegate import recovery
from tidegate.state.common.options import StateBackendOptions
from tidegate.storage.checkpoints.metadata import SubtaskState

pytestmark = pytest.mark.slow

ROWS, GATE, KEYS = 3_000, 1_000, 5
BACKENDS = pytest.mark.parametrize("backend", ["columnar", "rocksdb"])
_ROW_SCHEMA = pa.schema({name: pa.int64() for name in ("k", "x", "count", "seen", "even", "entries")})
_FILE = re.compile(r"(?P<task>.+)\.\d+-(?P<number>\d+)\.(?P<kind>base|segment)")


class Running(tg.ProcessFunction):
    """What was seen of each key so far, in every kind of state: much that comes, stays, changes and goes again."""

    failures: list[int]

    def open(self, context: tg.ProcessContext) -> None:
        self._count = context.state(tg.ValueState("count", int))
        self._seen = context.state(tg.ListState("seen", int))
        self._even = context.state(tg.ValueState("even", int))
        self._entries = context.state(tg.MapState("entries", int, int))

    def process(self, row: Any, context: tg.ProcessContext) -> list[dict[str, Any]]:
        x = row["x"]
        if x in self.failures:
            self.failures.remove(x)
            raise RuntimeError("as told")
        count = (self._count.value() or 0) + 1
        self._count.update(count)
        self._seen.add(x)
        even = self._even.value()
        if x % 2:
            self._even.clear()
        else:
            self._even.update(x)
        self._entries.put(x % 30, x)
        if x % 3 == 0:
            self._entries.remove((x + 15) % 30)
        seen, entries = len(self._seen.get()), sum(self._entries.values())
        return [{"k": row["k"], "x": x, "count": count, "seen": seen, "even": even, "entries": entries}]


def expected_rows(start: int) -> list[tuple[int | None, ...]]:
    """What `Running` gives for the rows from a position on."""
    found: list[tuple[int | None, ...]] = []
    entries: dict[int, dict[int, int]] = {k: {} for k in range(KEYS)}
    for x in range(ROWS):
        held = entries[x % KEYS]
        held[x % 30] = x
        if x % 3 == 0:
            held.pop((x + 15) % 30, None)
        count = x // KEYS + 1
        even = x - KEYS if x >= KEYS and x % 2 else None  # what the row before it left
        found.append((x % KEYS, x, count, count, even, sum(held.values())))
    return sorted(found[start:], key=repr)


class Program:
    """The job of these tests, in folders of its own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.failures: list[int] = []
        monkeypatch.setattr(Running, "failures", self.failures, raising=False)

    def config(self, backend: str, changelog: bool = True) -> tg.CheckpointConfig:
        """Nothing is inlined, so that what is written can be seen."""
        return tg.CheckpointConfig(
            storage=self.folder / "ckpt",
            backend=backend,
            changelog=changelog,
            inline_threshold=0,
            **({"backend_directory": self.folder / "work"} if backend == "rocksdb" else {}),
        )

    def environment(self, parallelism: int = 2) -> tg.StreamEnvironment:
        """Segments are written after very few changes, one a turn at most: so batches are not put together."""
        options = tg.DataPlaneOptions(source_rows_max=50, backend=StateBackendOptions(segment_bytes=2_000))
        return tg.StreamEnvironment.local(parallelism, config={"task.merged-rows": 1}, options=options)

    def build(self, env: tg.StreamEnvironment, source: GatedSource) -> tuple[tg.CollectedRows, tg.CollectedRows]:
        """Counts at the end, and `Running`."""
        rows = env.from_source(source, uid="source").key_by("k")
        totals = rows.aggregate(n=tg.count(), emit="final", uid="totals").collect(uid="totals-out")
        return totals, rows.process(Running(), schema=_ROW_SCHEMA, uid="running").collect(uid="running-out")

    def resume(self, path: str, parallelism: int, backend: str, changelog: bool, start: int = 0) -> None:
        """From a checkpoint at the gate to the end: all that was collected is right, rows before `start` left out."""
        with self.environment(parallelism) as env:
            tables = self.build(env, GatedSource(ROWS))
            job = env.execute("job", checkpoints=self.config(backend, changelog), restart=NO_RESTART, restore=path)
            assert job.wait("4min") == "finished"
        check(tables, start)

    def changelog(self, job: tg.Job) -> set[str]:
        """Paths of the files in the job's changelog, from its root."""
        root = self.folder / "ckpt"
        return {str(path.relative_to(root)) for path in (root / job.job_id / "shared" / "changelog").glob("*")}


def check(tables: tuple[tg.CollectedRows, tg.CollectedRows], start: int) -> None:
    """All rows are counted, and those from a position on were seen with the right state."""
    totals, running = (table.to_arrow() for table in tables)
    assert {row["k"]: row["n"] for row in totals.to_pylist()} == dict.fromkeys(range(KEYS), ROWS // KEYS)
    assert sorted((tuple(row.values()) for row in running.to_pylist()), key=repr) == expected_rows(start)


def asked(job: tg.Job) -> bool:
    """Ask for a checkpoint; whether there is one. There is none while a failed attempt is not over."""
    try:
        job.trigger_checkpoint()
    except tg.CheckpointError:
        return False
    return True


def layered(path: str) -> list[SubtaskState]:
    """The parts of a checkpoint that have layers."""
    return [subtask for subtask in recovery.inspect(path).metadata.subtasks if subtask.layers]


def referenced(path: str) -> set[str]:
    """The shared files that a checkpoint refers to."""
    return {shared for subtask in recovery.inspect(path).metadata.subtasks for shared in subtask.shared_paths}


def has_later_bases(files: set[str], path: str) -> bool:
    """Whether there are bases that a checkpoint does not refer to."""
    return any(file.endswith(".base") for file in files - referenced(path))


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """The job."""
    return Program(tmp_path, monkeypatch)


@BACKENDS
def test_changes_are_written_before_a_checkpoint_asks(program: Program, backend: str) -> None:
    """Segments are there while no checkpoint has been; one that is asked for then refers to a base and what is above
    it, in the order of their numbers, and writes no keyed state elsewhere."""
    source = GatedSource(ROWS, gates=(GATE,))
    with program.environment() as env, opening(source):
        tables = program.build(env, source)
        job = env.execute("job", checkpoints=program.config(backend), restart=NO_RESTART)
        source.await_gate(GATE)
        until("a segment", lambda: any(path.endswith(".segment") for path in program.changelog(job)))
        assert job.statistics().completed == 0
        path = job.trigger_checkpoint()
        assert referenced(path) <= program.changelog(job)
        assert len(layered(path)) >= 2
        for subtask in layered(path):
            files = [_FILE.fullmatch(Path(str(handle.path)).name) for handle in subtask.layers]
            assert all(file is not None for file in files)
            numbers = [int(file["number"]) for file in files if file is not None]
            assert numbers == sorted(set(numbers))
            assert next(file["kind"] for file in files if file is not None) == "base"
        assert list((program.folder / "ckpt" / job.job_id / "shared").glob("chk-*")) == []
        source.open_all()
        assert job.wait("4min") == "finished"
    check(tables, 0)


@BACKENDS
def test_old_segments_go_when_a_base_has_taken_their_place(program: Program, backend: str) -> None:
    """A base is written beside processing; what lies below it goes with the last checkpoint that refers to it. In the
    end, when tasks have finished and have no state, nothing is left."""
    gates = (GATE, GATE + 1_000, *range(GATE + 1_200, ROWS, 200))
    source = GatedSource(ROWS, gates=gates)
    with program.environment() as env, opening(source):
        tables = program.build(env, source)
        job = env.execute("job", checkpoints=program.config(backend), restart=NO_RESTART)
        source.await_gate(GATE)
        path = job.trigger_checkpoint()
        first = referenced(path)
        source.open_gate(GATE)
        until("a base beside processing", lambda: has_later_bases(program.changelog(job), path))
        for gate in gates[1:]:
            source.await_gate(gate)
            assert referenced(path) <= program.changelog(job), (
                "whatever bases have come since, a checkpoint stays whole"
            )
            path = job.trigger_checkpoint()
            if gate == gates[-1]:
                until("that other bases have come", lambda: not first & referenced(job.trigger_checkpoint()))
                until("that old files have gone", lambda: not first & program.changelog(job))
            source.open_gate(gate)
        assert job.wait("4min") == "finished"
    assert program.changelog(job) == set()
    check(tables, 0)


@BACKENDS
def test_a_task_that_fails_goes_on_from_its_log(program: Program, backend: str) -> None:
    """Twice: the second attempt goes on above the layers that it was restored from, and the third one is restored
    from what the two wrote. Every row counts once."""
    program.failures += [GATE + 700, GATE + 1_500]
    source = GatedSource(ROWS, gates=(GATE, GATE + 1_000))
    with program.environment() as env, opening(source):
        tables = program.build(env, source)
        restart = tg.RestartStrategy.fixed_delay(2, "1ms")
        job = env.execute("job", checkpoints=program.config(backend), restart=restart)
        source.await_gate(GATE)
        job.trigger_checkpoint()
        source.open_gate(GATE)
        until("a checkpoint of the second attempt", lambda: len(program.failures) == 1 and asked(job))
        source.open_all()
        assert job.wait("4min") == "finished"
    assert program.failures == []
    check(tables, 0)


@BACKENDS
def test_checkpoints_of_a_changelog_are_restored_anywhere(program: Program, backend: str) -> None:
    """At the same and at other parallelisms, with a changelog and without, and on the other backend."""
    other = "columnar" if backend == "rocksdb" else "rocksdb"
    path = stopped(program, backend, lambda job: job.trigger_checkpoint())
    for parallelism, on, changelog in ((2, backend, True), (3, backend, True), (2, backend, False), (1, other, True)):
        program.resume(path, parallelism, on, changelog)


@BACKENDS
def test_a_savepoint_of_a_changelog_is_whole_by_itself(program: Program, backend: str) -> None:
    """It refers to no segment of the job, whose folder may be deleted, and may be moved."""
    path = stopped(program, backend, lambda job: job.savepoint(str(program.folder / "savepoints")))
    moved = program.folder / "elsewhere" / Path(path).name
    shutil.move(path, moved)
    shutil.rmtree(program.folder / "ckpt")
    assert recovery.verify(str(moved)).ok
    program.resume(str(moved), 2, backend, changelog=True, start=GATE)
    program.resume(str(moved), 3, backend, changelog=False, start=GATE)


def stopped(program: Program, backend: str, ask: Callable[[tg.Job], str]) -> str:
    """A job that was asked for something at the gate, when segments had been written, and was cancelled then."""
    source = GatedSource(ROWS, gates=(GATE,))
    with program.environment() as env, opening(source):
        program.build(env, source)
        job = env.execute("job", checkpoints=program.config(backend), restart=NO_RESTART)
        source.await_gate(GATE)
        until("a segment", lambda: any(path.endswith(".segment") for path in program.changelog(job)))
        path = ask(job)
        job.cancel()
        assert job.wait("4min") == "cancelled"
    return path

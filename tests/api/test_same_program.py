"""One random program gives the same on every backend as on a dictionary, whatever happens to its job.

Jobs stop behind checkpoints and savepoints, go on at another parallelism and with another backend, and fail in between.
Every snapshot holds the state of the rows that it covers, and at the end every row has been told of once.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from local_jobs import config
from random_program import DOINGS, FAR_MS, KEYS, TOLD, Model, Program, Row, StoppingSource, numbered

import tidegate as tg
from tidegate import recovery
from tidegate.state.common.options import StateBackendOptions
from tidegate.storage.checkpoints.metadata import CheckpointMetadata, SnapshotKind
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.files.store import Store
from tidegate.storage.ids import OperatorUid
from tidegate.storage.state.snapshot import StateTable

pytestmark = pytest.mark.slow

BACKENDS: dict[str, dict[str, Any]] = {
    "columnar": {},
    "columnar incremental": {"incremental": True},
    "columnar changelog": {"changelog": True},
    "rocksdb": {"backend": "rocksdb"},
    "rocksdb incremental": {"backend": "rocksdb", "incremental": True},
    "rocksdb changelog": {"backend": "rocksdb", "changelog": True},
}
SUMS: dict[str, Any] = {"n": tg.count(), "total": tg.sum("x"), "least": tg.min("x")}


@dataclass(frozen=True, slots=True)
class Step:
    """Some rows are read, the job failing at one of them or not, and a snapshot is taken."""

    rows: int
    fails_at: int | None
    snapshot: str | None


@dataclass(frozen=True, slots=True)
class Phase:
    """One job. `lost` rows are read behind its last step before it is cancelled; None: it stops with a savepoint."""

    backend: str
    parallelism: int
    steps: tuple[Step, ...]
    lost: int | None
    unaligned: bool
    inline: bool
    local_copies: bool
    compression: str | None


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Some rows; in one of four steps the job fails at one of them."""
    rows = draw(st.integers(1, 12))
    at = draw(st.sampled_from([None, None, None, draw(st.integers(0, rows - 1))]))
    return Step(
        rows, at, draw(st.sampled_from(["checkpoint", "checkpoint", "checkpoint", "savepoint", "savepoint", None]))
    )


PHASES = st.lists(
    st.builds(
        Phase,
        backend=st.sampled_from(sorted(BACKENDS)),
        parallelism=st.integers(1, 4),
        steps=st.lists(steps(), min_size=1, max_size=4).map(tuple),
        lost=st.none() | st.integers(0, 4),
        unaligned=st.sampled_from([False, False, True]),
        inline=st.booleans(),
        local_copies=st.booleans(),
        compression=st.sampled_from([None, "lz4", "zstd"]),
    ),
    min_size=2,
    max_size=3,
)
BEGINNING = (
    Step(9, None, "checkpoint"),
    Step(6, 3, "checkpoint"),
    Step(6, None, "savepoint"),
    Step(3, None, "checkpoint"),
    Step(3, 1, "checkpoint"),
)
"""Of every first job: restarts go on from checkpoints of the same job, and a savepoint is between checkpoints."""
FIRST_ROWS = (
    *(("a", "put", 1), ("a", "append", 3), ("a", "set", 2), ("b", "put", 3), ("b", "fold", 4)),
    *(("c", "append", 2), ("c", "set", 5), (None, "fold", 6), (None, "far", 1)),
    *(("a", "clear", 0), ("b", "clear", 0), ("d", "put", 7), ("d", "near", 8), ("e", "fold", 1), (None, "fold", 2)),
    *(("c", "clear", 0), ("d", "put", 2), (None, "set", 3), ("d", "append", 3), ("b", "append", 1), ("c", "fold", 9)),
    *(("e", "fold", 0), ("e", "put", 1), ("e", "append", 2)),
)
"""Read in these steps: keys lose what the checkpoint before has, one of them before the savepoint and not since."""
EXAMPLES = 3
"""Of each backend; an example runs jobs for a second or two, so one that fails is shown as it is, not shrunk."""

PROGRAMS = st.lists(
    st.tuples(st.sampled_from(KEYS), st.sampled_from(DOINGS), st.integers(0, 9)), min_size=30, max_size=80
)


class Run:
    """The program in one job after the other."""

    def __init__(self, rows: Sequence[Row], folder: Path) -> None:
        self.rows = rows
        self._folder = folder
        self._read = 0
        self._newest: str | None = None

    def job(self, phase: Phase, last: bool) -> None:
        """Go on from the newest snapshot; the last job runs to the end of the input, and has told everything then."""
        Program.source = source = StoppingSource(self.rows)
        options = tg.DataPlaneOptions(source_rows_max=3, backend=StateBackendOptions(segment_bytes=300))
        try:
            with tg.StreamEnvironment.local(phase.parallelism, options=options) as env:
                stream = env.from_source(source, uid="source", parallelism=source.SPLITS)
                keyed = stream.assign_timestamps("t", uid="times").key_by("k")
                told = keyed.process(Program(), schema=TOLD, uid="program").collect(uid="told")
                final = keyed.aggregate(**SUMS, emit="final", uid="final").collect(uid="sums")
                upserted = keyed.aggregate(**SUMS, uid="running").to_table(
                    str(self._folder / "running"), mode="upsert", keys=["k"], uid="upserted"
                )
                failures = sum(step.fails_at is not None for step in phase.steps)
                job = env.execute(
                    "program",
                    checkpoints=self._config(phase),
                    restart=tg.RestartStrategy.fixed_delay(max(1, failures), "1ms"),
                    restore=self._newest,
                )
                for step in phase.steps:
                    self._step(job, source, step)
                if last:
                    self._finish(job, source)
                    self._check_told(told, final, upserted)
                elif phase.lost is None:
                    self._take(source, job.stop(savepoint=str(self._folder / "savepoints"), timeout="4min"))
                else:
                    source.read_up_to(job, min(self._read + phase.lost, len(self.rows)))
                    job.cancel()
                    assert job.wait("4min") == "cancelled"
        finally:
            source.end()

    def _config(self, phase: Phase) -> tg.CheckpointConfig:
        given = dict(BACKENDS[phase.backend])
        if given.get("backend") == "rocksdb":
            given["backend_directory"] = self._folder / "work"
        if phase.local_copies:
            given |= {"local_copies": True, "local_directory": self._folder / "copies"}
        if not phase.inline:
            given["inline_threshold"] = 0
        given |= {"unaligned": phase.unaligned, "compression": phase.compression}
        return config(self._folder / "checkpoints", **given)

    def _step(self, job: tg.Job, source: StoppingSource, step: Step) -> None:
        before, self._read = self._read, min(self._read + step.rows, len(self.rows))
        fails_at = None if step.fails_at is None else before + step.fails_at
        source.read_up_to(job, self._read, fails_at if fails_at is not None and fails_at < self._read else None)
        if step.snapshot == "checkpoint":
            self._take(source, job.trigger_checkpoint("4min"))
        elif step.snapshot == "savepoint":
            self._take(source, job.savepoint(str(self._folder / "savepoints"), "4min"))

    def _finish(self, job: tg.Job, source: StoppingSource) -> None:
        source.read_up_to(job, len(self.rows))
        self._take(source, job.savepoint(str(self._folder / "savepoints"), "4min"))
        source.end()
        assert job.wait("4min") == "finished"

    def _take(self, source: StoppingSource, path: str) -> None:
        """A snapshot has the state of the rows that it covers."""
        self._newest = path
        report = recovery.verify(path)
        assert report.ok, report.problems
        metadata = recovery.inspect(path).metadata
        savepoint = metadata.kind is not SnapshotKind.CHECKPOINT
        store = open_store(path if savepoint else str(self._folder / "checkpoints"))
        if any(subtask.in_flight is not None for subtask in metadata.subtasks):
            return  # rows that were overtaken are covered, and not yet in the state
        offsets = of_state(store, metadata, "source")["splits"]
        covered = [row for n, rows in enumerate(source.rows) for row in rows[: offsets[f"split {n}"]["next_offset"]]]
        model = Model.after(sorted(covered, key=lambda row: row["n"]))
        check_sums(model, of_state(store, metadata, "final"))
        check_sums(model, of_state(store, metadata, "running"))
        check_program(model, of_state(store, metadata, "program"))

    def _check_told(self, told: tg.CollectedRows, final: tg.CollectedRows, upserted: tg.OutputTable) -> None:
        model = Model.after(self.rows)
        model.end()
        found = [(row["k"], row["n"], row["shown"]) for row in told.to_arrow().to_pylist()]
        assert Counter(model.told) == Counter(found)
        sums = Counter((k, *key.sums) for k, key in model.keys.items())
        for table in (final, upserted):
            rows = table.to_arrow().select(["k", *SUMS]).to_pylist()
            assert sums == Counter(tuple(row.values()) for row in rows)


def of_state(store: Store, metadata: CheckpointMetadata, uid: str) -> dict[str, dict[Any, dict[str, Any]]]:
    """The values of each key of each state, from tables that come one after the other."""
    found: dict[str, dict[Any, dict[str, Any]]] = {}
    for table in recovery.load_operator_state(store, metadata, OperatorUid(uid)):
        state = found.setdefault(table.state, {})
        for key, values in keyed(table):
            if table.removed:
                state.pop(key, None)
            else:
                assert table.layer > 0 or key not in state, "a key is there twice"
                state[key] = values
    return {state: rows for state, rows in found.items() if rows}


def keyed(table: StateTable) -> list[tuple[Any, dict[str, Any]]]:
    """Rows of a table, with what makes them one: of timers that is everything."""
    if table.state == "_tidegate_timers":
        return [(tuple(row.values()), row) for row in table.rows.to_pylist()]
    return [(next(iter(row.values())), row) for row in table.rows.to_pylist()]


def check_sums(model: Model, found: dict[str, dict[Any, dict[str, Any]]]) -> None:
    """State of an aggregate."""
    expected = {k: key.sums for k, key in model.keys.items()}
    rows = [row for state in found.values() for row in state.values()]
    assert expected == {row["k"]: (row["n"], row["total"], row["least"]) for row in rows}


def check_program(model: Model, found: dict[str, dict[Any, dict[str, Any]]]) -> None:
    """State of the program: what has a key of the dictionary, and nothing else."""
    expected = {
        "value": {k: {"x": key.value[0], "tag": key.value[1]} for k, key in model.keys.items() if key.value},
        "items": {k: key.items for k, key in model.keys.items() if key.items},
        "entries": {k: sorted(key.entries.items()) for k, key in model.keys.items() if key.entries},
        "low": {k: key.low for k, key in model.keys.items() if key.low is not None},
        "lasting": {k: key.lasting for k, key in model.keys.items() if key.lasting},
    }
    values = {
        state: {k: row[state] for k, row in rows.items()}
        for state, rows in found.items()
        if state != "_tidegate_timers"
    }
    values["entries"] = {k: sorted(entries) for k, entries in values.get("entries", {}).items()}
    values["lasting"] = {k: [e["value"] for e in elements] for k, elements in values.get("lasting", {}).items()}
    assert expected == {state: values.get(state, {}) for state in expected}

    timers = [(row["k"], row["_tidegate_timer_timestamp_ms"]) for row in found.get("_tidegate_timers", {}).values()]
    far = Counter((k, at_ms) for k, key in model.keys.items() for at_ms in key.far)
    assert far == Counter((k, at_ms) for k, at_ms in timers if at_ms >= FAR_MS)
    fired = Counter(values.get("fired", {})) + Counter(k for k, at_ms in timers if at_ms < FAR_MS)
    assert Counter({k: len(key.near) for k, key in model.keys.items() if key.near}) == fired


@pytest.mark.parametrize("backend", sorted(BACKENDS))
@settings(max_examples=EXAMPLES, deadline=None, phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate])
@given(data=st.data())
def test_a_program_is_the_same_whatever_happens_to_its_job(backend: str, data: st.DataObject) -> None:
    """Each snapshot, and all that was told at the end, is what a dictionary gives; every other job has the backend."""
    rows = numbered([*FIRST_ROWS, *data.draw(PROGRAMS)])
    jobs = data.draw(PHASES)
    jobs = [replace(phase, backend=backend) if n % 2 == 0 else phase for n, phase in enumerate(jobs)]
    jobs[0] = replace(jobs[0], steps=(*BEGINNING, *jobs[0].steps))
    with tempfile.TemporaryDirectory() as folder:
        run = Run(rows, Path(folder))
        for phase in jobs:
            run.job(phase, last=phase is jobs[-1])

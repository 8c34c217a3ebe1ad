"""Timers of every backend are those of a plain set: registered, deleted and fired in order, through snapshots that are
built on each other, restores, other key groups, and ways back."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from backend_model import (
    BACKENDS,
    KEYS,
    MAX_PARALLELISM,
    WITH_INCREMENTS,
    Snapshots,
    composed,
    key_batch,
    state_tables,
    tables,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from timer_model import TimersSubject

from tidegate.state.columnar import columnar_timers, key_space
from tidegate.state.columnar.columnar_backend import ColumnarBackend
from tidegate.state.kernels.hashing import hash_columns
from tidegate.state.rocksdb import frozen_rows as rocks_changes
from tidegate.state.rocksdb import timers as rocks_timers
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.errors import CorruptionError
from tidegate.storage.ids import CheckpointId
from tidegate.storage.state.canonical import FrozenCanonical
from tidegate.storage.state.snapshot import Cut, StateTable
from tidegate.storage.state.stored_rows import timers_schema

_EXAMPLES = {"columnar": 60, "rocksdb": 15, "rocksdb with changelog": 20}
_CHANGES = st.lists(
    st.tuples(st.integers(0, 6), st.integers(0, 1), st.integers(-2, 5), st.sampled_from([True, True, False])),
    min_size=1,
    max_size=12,
)
_STEPS = st.lists(
    st.tuples(st.just("batch"), _CHANGES)
    | st.tuples(st.just("batch"), _CHANGES)
    | st.tuples(st.just("fire"), st.tuples(st.integers(0, 1), st.integers(-3, 9), st.integers(1, 5)))
    | st.tuples(st.just("fire"), st.tuples(st.integers(0, 1), st.just(9), st.integers(1, 5)))
    | st.tuples(st.sampled_from(["freeze", "checkpoint", "checkpoint"]), st.booleans())
    | st.tuples(st.sampled_from(["write", "complete", "abort"]), st.integers(0, 3))
    | st.tuples(st.sampled_from(["restore", "back", "back"]), st.none()),
    min_size=15,
    max_size=40,
)


@pytest.fixture(autouse=True)
def all_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few timers are more than what is in front, or in memory."""
    monkeypatch.setattr(columnar_timers, "FRONT_TIMERS", 4)
    monkeypatch.setattr(key_space, "COMPACTED_SLOTS_MIN", 4)
    monkeypatch.setattr(rocks_timers, "HEAD_TIMERS", 4)
    monkeypatch.setattr(rocks_timers, "READ_MIN", 2)
    monkeypatch.setattr(rocks_changes, "KEYS_MAX", 6)


def _made(name: str, undo_bytes_max: int) -> Any:
    if name == "columnar":
        return lambda incremental: ColumnarBackend(MAX_PARALLELISM, tuple(KEYS.names), incremental, undo_bytes_max)
    return BACKENDS[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(_EXAMPLES))
def test_timers_are_those_of_a_set(name: str) -> None:
    """What fires is what the model has, in order; every snapshot, alone or on its base, holds the moment of its freeze;
    a restore, or a way back, gives that moment again, and what is built on it after that is right too."""

    @settings(max_examples=_EXAMPLES[name], deadline=None)
    @given(steps=_STEPS, undo_bytes_max=st.sampled_from([1500, 1 << 30]))
    def runs(steps: list[tuple[str, Any]], undo_bytes_max: int) -> None:
        make = _made(name, undo_bytes_max)
        snapshots: Any = Snapshots(TimersSubject(make, True))  # type: ignore[arg-type]
        for what, argument in steps:
            subject, stored = snapshots.subject, snapshots.completed
            if what == "batch":
                subject.batch(argument)
            elif what == "fire":
                subject.fire(*argument)
            elif what == "checkpoint":
                snapshots.freeze(argument)
                snapshots.complete(-1)
            elif what == "restore":
                subject.backend.close()
                again = TimersSubject(make, True, () if stored is None else stored[1])
                snapshots = Snapshots(again, stored)  # type: ignore[arg-type]
                if stored is not None:
                    again.backend.keep(stored[0])
            elif what == "back":
                kept = None if stored is None else subject.backend.kept(stored[0])
                if kept is not None:
                    subject.backend.go_back(stored[0])
                    assert {table.state for table in kept} <= {"_tidegate_timers"}
                    again = TimersSubject(subject.backend, True, kept, composed(stored[1]))
                    snapshots = Snapshots(again, stored)  # type: ignore[arg-type]
            else:
                getattr(snapshots, what)(argument)
            snapshots.subject.check()
        snapshots.freeze(True)
        snapshots.complete_all()
        snapshots.subject.fire_all()
        snapshots.subject.backend.close()

    runs()


@pytest.mark.parametrize("name", sorted(BACKENDS))
def test_a_timer_that_is_registered_again_fires_once(name: str) -> None:
    """Deleted and registered several times, in batches of their own and in one."""
    subject = TimersSubject(BACKENDS[name], True)
    for _ in range(3):
        subject.batch([(1, 0, 5, True), (2, 0, 5, True)])
        subject.batch([(1, 0, 5, False)])
    subject.batch([(1, 0, 5, True), (1, 0, 5, False), (1, 0, 5, True)])
    assert [key[0] for _, key in subject.fire(0, 5, 9)] == [1, 2]
    subject.check()


@pytest.mark.parametrize("name", WITH_INCREMENTS)
def test_a_snapshot_on_a_base_holds_what_has_changed(name: str) -> None:
    """Of thousands of timers a few rows: put, gone, and nothing of one that came and went in between."""
    subject = TimersSubject(BACKENDS[name], True)
    subject.batch([(key, 0, 1000 + key, True) for key in range(3000)])
    base = tables(subject.backend.freeze(Cut(CheckpointId(1))))
    subject.batch([(1, 0, 1001, False), (2, 1, 7, True), (3, 0, 5, True)])
    subject.fire(0, 5, 10)
    changed = tables(subject.backend.freeze(Cut(CheckpointId(2), CheckpointId(1))), layer=1)

    assert sum(table.rows.num_rows for table in base) == 3000
    put = [row["k"] for table in changed if not table.removed for row in table.rows.to_pylist()]
    gone = [row["k"] for table in changed if table.removed for row in table.rows.to_pylist()]
    assert put == [2]
    assert 1 in gone
    assert set(gone) <= {1, 3}
    assert composed([*base, *changed]) == subject.expected()


@pytest.mark.parametrize("name", WITH_INCREMENTS)
def test_a_restored_timer_that_has_gone_is_told(name: str) -> None:
    """The first snapshot after a restore may be built on the checkpoint that it was restored from."""
    first = TimersSubject(BACKENDS[name], True)
    first.batch([(key, 0, key, True) for key in range(9)])
    stored = tables(first.backend.freeze(Cut(CheckpointId(1))))
    again = TimersSubject(BACKENDS[name], True, stored)
    again.fire(0, 3, 9)
    changed = tables(again.backend.freeze(Cut(CheckpointId(2), CheckpointId(1))), layer=1)
    assert composed([*stored, *changed]) == again.expected()


def test_timers_that_have_fired_fire_again_after_a_way_back() -> None:
    """Those that were registered since do not; the undo log of timers keeps to the limit of all state."""
    subject = TimersSubject(_made("columnar", 1 << 30), True)
    subject.batch([(key, 0, key, True) for key in range(20)])
    subject.backend.freeze(Cut(CheckpointId(1)))
    before = set(subject.model)
    subject.fire(0, 11, 99)
    subject.batch([(1, 0, 2, True), (2, 1, 3, True), (19, 0, 19, False)])
    subject.backend.go_back(CheckpointId(1))
    subject.model = before
    subject.check()
    assert [key[0] for _, key in subject.fire(0, 99, 99)] == list(range(20))

    little = TimersSubject(_made("columnar", 900), True)
    little.batch([(key, 0, key, True) for key in range(600)])
    little.backend.freeze(Cut(CheckpointId(1)))
    assert little.backend.goes_back
    little.fire(0, 500, 500)
    assert not little.backend.goes_back
    assert little.backend.kept(CheckpointId(1)) is None


def test_what_came_and_went_leaves_nothing_in_memory_or_in_a_snapshot() -> None:
    """Each key moves its timer with every row: neither the snapshot nor memory grows with the number of rows."""
    backend = BACKENDS["columnar"](True)
    subject = TimersSubject(backend, True)
    subject.batch([(0, 0, 0, True)])
    backend.freeze(Cut(CheckpointId(1)))
    for moment in range(200):
        subject.batch([(0, 0, moment, False), (0, 0, moment + 1, True)])
    changed = tables(backend.freeze(Cut(CheckpointId(2), CheckpointId(1))))

    assert sum(table.rows.num_rows for table in changed) == 2
    assert isinstance(backend, ColumnarBackend)
    assert backend.timers._space.slots < 20


@pytest.mark.parametrize("name", ["rocksdb", "rocksdb with changelog"])
def test_rocksdb_holds_a_bounded_number_in_memory(name: str) -> None:
    """Many more timers than that, registered before and behind what is in memory, fire in order."""
    subject = TimersSubject(BACKENDS[name], True)
    for start in range(0, 400, 50):
        subject.batch([(key * 37 % 1009, 0, key * 101 % 83, True) for key in range(start, start + 50)])
        for head in subject.backend.timers._heads:  # type: ignore[attr-defined]
            assert len(head._there) <= 2 * rocks_timers.HEAD_TIMERS
            assert len(head._heap) <= 4 * rocks_timers.HEAD_TIMERS
    fired = [timer for _ in range(1000) for timer in subject.fire(0, 82, 7)]
    assert len(fired) == 400
    subject.check()


def test_timers_move_between_backends_and_parallelisms() -> None:
    """From each backend to each, split by key group: every timer is where its key is, once, and the bytes are alike."""
    changes = [(key, key % 2, key * 7 % 11, True) for key in range(60)]
    written = {}
    for name, make in BACKENDS.items():
        subject = TimersSubject(make, True)
        subject.batch(list(reversed(changes)))
        subject.batch([(5, 1, 35 % 11, False)])
        frozen = subject.backend.freeze(Cut(CheckpointId(3), canonical=True))
        written[name] = [table.rows for state in frozen for table in state_tables(FrozenCanonical(state))]
        assert sum(rows.num_rows for rows in written[name]) == 59
        subject.backend.close()
    first, *others = written.values()
    assert all(rows == first for rows in others)

    table = pa.Table.from_batches(first).combine_chunks().to_batches()[0]
    groups = hash_columns(table, KEYS.names) % MAX_PARALLELISM
    for make in BACKENDS.values():
        moved = 0
        for part in (groups < 5, groups >= 5):
            stored = StateTable("_tidegate_timers", StateKind.KEYED, table.filter(pa.array(part)))
            subject = TimersSubject(make, True, [stored])
            subject.check()
            moved += len(subject.model)
            subject.fire_all()
            subject.backend.close()
        assert moved == 59


@pytest.mark.parametrize("name", sorted(BACKENDS))
def test_damaged_timers_are_refused(name: str) -> None:
    """A timer twice, a clock that there is not, other columns."""
    keys = key_batch([1, 2])

    def stored(domains: list[str | None], moments: pa.Array) -> StateTable:
        columns = [*keys.columns, pa.array(domains, pa.string()), moments]
        rows = pa.RecordBatch.from_arrays(columns, names=timers_schema(KEYS).names)
        return StateTable("_tidegate_timers", StateKind.KEYED, rows)

    right = stored(["event_time", "event_time"], pa.array([1, 1]))
    with pytest.raises(CorruptionError, match="twice"):
        TimersSubject(BACKENDS[name], True, [right, right])
    for domains in (["event_time", "moon"], ["event_time", None]):
        with pytest.raises(CorruptionError, match="stored timers have the clocks"):
            TimersSubject(BACKENDS[name], True, [stored(domains, pa.array([1, 1]))])
    with pytest.raises(CorruptionError, match="stored timers have columns"):
        TimersSubject(BACKENDS[name], True, [StateTable("_tidegate_timers", StateKind.KEYED, keys)])

"""What a subtask builds its snapshots on: only what the barrier names, and only while that is cheaper than anew."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.actors.task.incremental_base import (
    CHANGED_ROWS_MIN,
    DELTAS_BYTES_MIN,
    LAYERS_MAX,
    LINEAGES_MAX,
    IncrementalBase,
    IncrementalBases,
)
from tidegate.protocol.stream_elements import Barrier, BarrierOptions
from tidegate.storage.checkpoints.metadata import (
    NativeFile,
    NativeState,
    SavepointFormat,
    SnapshotKind,
    StateHandle,
)
from tidegate.storage.ids import CheckpointId, OperatorUid
from tidegate.storage.state.snapshot import Cut

BASE_BYTES = 10 * DELTAS_BYTES_MIN


def layers(*sizes: int) -> tuple[StateHandle, ...]:
    """Layers of these sizes, the base first."""
    return tuple(StateHandle(f"shared/{i}", None, size, "sum", ()) for i, size in enumerate(sizes))


def native(*names: str) -> tuple[NativeState, ...]:
    """The state of one operator as these files."""
    files = tuple(NativeFile(name, f"shared/{name}", 10, "sum") for name in names)
    return (NativeState(OperatorUid("agg"), "rocksdb", (0, 128), b"", files),)


def lineage(checkpoint_id: int, *sizes: int) -> IncrementalBase:
    """What a subtask has in a checkpoint."""
    return IncrementalBase(CheckpointId(checkpoint_id), layers(*sizes))


def cut(known: IncrementalBases, checkpoint_id: int, base: int | None, **settings: object) -> Cut:
    """What the snapshot of a barrier is to hold."""
    options = BarrierOptions(kind=settings.get("kind", SnapshotKind.CHECKPOINT))  # type: ignore[arg-type]
    barrier = Barrier(CheckpointId(checkpoint_id), 0, options, None if base is None else CheckpointId(base))
    changed, rows = settings.get("changed", (0, 0))  # type: ignore[misc]
    found, below = known.begin(barrier, bool(settings.get("finished")), lambda _: (changed, rows))
    assert found.base == (None if below is None else below.checkpoint_id)
    return found


def test_a_snapshot_is_built_on_what_its_barrier_names_and_on_nothing_else() -> None:
    """Not on a newer one, which may fail yet, nor on one of which the subtask has no part, nor where none is named."""
    known = IncrementalBases()
    known.remember(lineage(3, 100))
    known.remember(lineage(4, 100, 10))

    assert cut(known, 5, None) == Cut(CheckpointId(5))
    assert cut(known, 6, 2) == Cut(CheckpointId(6))
    assert cut(known, 7, 3) == Cut(CheckpointId(7), base=CheckpointId(3))
    assert cut(known, 8, 4) == Cut(CheckpointId(8), base=CheckpointId(4))


def test_what_was_given_up_is_no_base() -> None:
    """Its files go."""
    known = IncrementalBases()
    known.remember(lineage(3, 100))
    known.forget(CheckpointId(3))

    assert cut(known, 4, 3) == Cut(CheckpointId(4))


@pytest.mark.parametrize("kind", [kind for kind in SnapshotKind if kind.is_savepoint])
def test_a_savepoint_is_whole_and_in_the_common_form(kind: SnapshotKind) -> None:
    """It is the user's, and has nothing in common with what the job deletes."""
    known = IncrementalBases()
    known.remember(lineage(3, 100))

    assert cut(known, 4, 3, kind=kind) == Cut(CheckpointId(4), canonical=True)


def test_a_native_savepoint_is_built_on_what_its_barrier_names() -> None:
    """It is what a checkpoint is: the coordinator makes copies for the user."""
    known = IncrementalBases()
    known.remember(lineage(3, 100))
    options = BarrierOptions(kind=SnapshotKind.SAVEPOINT, savepoint_format=SavepointFormat.NATIVE)

    found, below = known.begin(
        Barrier(CheckpointId(4), 0, options, CheckpointId(3)), finished=False, changed_rows=lambda _: (0, 0)
    )

    assert found == Cut(CheckpointId(4), CheckpointId(3))
    assert below == lineage(3, 100)


def test_a_subtask_that_has_finished_builds_on_nothing() -> None:
    """It has no state any more."""
    known = IncrementalBases()
    known.remember(lineage(3, 100))

    assert cut(known, 4, 3, finished=True) == Cut(CheckpointId(4))


@pytest.mark.parametrize(
    ("changed", "rows", "whole"),
    [(5_000, 9_999, True), (5_000, 10_000, False), (CHANGED_ROWS_MIN, CHANGED_ROWS_MIN, False), (4_097, 4_097, True)],
)
def test_where_most_rows_have_changed_a_snapshot_is_whole(changed: int, rows: int, whole: bool) -> None:
    """More than half of them, if they are many: a restore then reads each once."""
    known = IncrementalBases()
    known.remember(lineage(3, BASE_BYTES))

    found = cut(known, 4, 3, changed=(changed, rows))

    assert found.base == (None if whole else CheckpointId(3))


def test_nothing_is_built_on_an_empty_part() -> None:
    """What is then put would have to be a base, and what was removed meanwhile has none below."""
    known = IncrementalBases()
    known.remember(lineage(3))

    assert cut(known, 4, 3) == Cut(CheckpointId(4))


def test_native_files_need_no_layers() -> None:
    """A backend with files of its own compacts by itself."""
    known = IncrementalBases()
    known.remember(IncrementalBase(CheckpointId(3), native=native("1.sst")))

    assert cut(known, 4, 3) == Cut(CheckpointId(4), base=CheckpointId(3))


@pytest.mark.parametrize(
    ("sizes", "extensible"),
    [
        ((BASE_BYTES,), True),
        ((BASE_BYTES, *[1] * (LAYERS_MAX - 2)), True),
        ((BASE_BYTES, *[1] * (LAYERS_MAX - 1)), False),
        ((BASE_BYTES, BASE_BYTES), True),
        ((BASE_BYTES, BASE_BYTES - 5, 6), False),
        ((10, DELTAS_BYTES_MIN), True),
        ((10, DELTAS_BYTES_MIN, 1), False),
    ],
)
def test_layers_are_few_and_no_larger_than_their_base(sizes: tuple[int, ...], extensible: bool) -> None:
    """Else the next snapshot is the base of a new stack: what a restore reads stays about twice the state."""
    known = IncrementalBases()
    known.remember(lineage(3, *sizes))

    assert (cut(known, 4, 3).base is not None) is extensible


@given(st.lists(st.integers(1, BASE_BYTES), min_size=1, max_size=60), st.integers(1, BASE_BYTES))
def test_storage_holds_a_bounded_multiple_of_the_state(deltas: list[int], whole: int) -> None:
    """However many checkpoints: few layers, and before the last of them no more than the base and as much again."""
    known = IncrementalBases()
    stack: tuple[StateHandle, ...] = ()
    for number, size in enumerate(deltas, start=1):
        below = cut(known, number, number - 1 or None).base
        stack = layers(*(h.size_bytes for h in stack), size) if below is not None else layers(whole)
        known.remember(IncrementalBase(CheckpointId(number), stack))

        assert len(stack) <= LAYERS_MAX
        assert sum(h.size_bytes for h in stack[1:-1]) <= max(whole, DELTAS_BYTES_MIN)


def test_what_is_remembered_is_bounded() -> None:
    """Checkpoints of which nothing was heard any more: the oldest are forgotten, at the latest when a base is newer."""
    known = IncrementalBases()
    for number in range(1, LINEAGES_MAX + 2):
        known.remember(lineage(number, 100))

    assert cut(known, 98, 1).base is None, "one more than may be"
    assert cut(known, 99, 2).base == 2
    assert cut(known, 100, 5).base == 5
    assert cut(known, 101, 4).base is None, "bases only become newer"

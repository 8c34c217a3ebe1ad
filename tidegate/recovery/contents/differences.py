"""`diff`: what has changed from one checkpoint to another: operators, parallelism, sizes, and on request keys.

Without `keys` only metadata is read. With it the states are read, too: the same few key groups of both at a time, so
that memory stays bounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from tidegate.recovery.contents.inspection import CheckpointReport, OperatorReport, inspect
from tidegate.recovery.contents.row_comparison import NO_CHANGES, KeyChanges, compare_rows
from tidegate.recovery.contents.state_catalog import StateInfo
from tidegate.recovery.contents.state_reader import StateSelection
from tidegate.storage.checkpoints.layout import parse_pointer
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.files.store import OpenStore
from tidegate.storage.ids import OperatorUid

PART_BYTES = 64 * 1024 * 1024
"""About how many bytes of state of one checkpoint are read at a time to compare keys."""

Change: TypeAlias = Literal["added", "removed", "changed", "same"]


@dataclass(frozen=True, slots=True)
class StateDiff:
    """One state of one operator. In a pair the older value comes first; None on the side that does not have the state.

    `keys` is None if they were not compared: it was not asked for, the state is not keyed, or neither checkpoint says
    which columns are the key (older versions did not always).
    """

    uid: OperatorUid
    state: str
    kind: StateKind
    change: Change
    size_bytes: tuple[int | None, int | None]
    keys: KeyChanges | None = None


@dataclass(frozen=True, slots=True)
class OperatorDiff:
    """One operator. In a pair the older value comes first; None (of sizes 0) on the side that does not have it."""

    uid: OperatorUid
    change: Change
    parallelism: tuple[int | None, int | None]
    max_parallelism: tuple[int | None, int | None]
    size_bytes: tuple[int, int]
    states: tuple[StateDiff, ...]


@dataclass(frozen=True, slots=True)
class CheckpointDiff:
    """What `diff` found. Operators of the older checkpoint come first, then those that are new."""

    old: str
    new: str
    size_bytes: tuple[int, int]
    operators: tuple[OperatorDiff, ...]

    @property
    def changed(self) -> tuple[OperatorDiff, ...]:
        """The operators that are not the same."""
        return tuple(operator for operator in self.operators if operator.change != "same")


def diff(old: str, new: str, *, keys: bool = False, open_store: OpenStore = open_store) -> CheckpointDiff:
    """What has changed from one checkpoint or savepoint to another. Paths are as for `inspect`.

    They may be of different jobs. With `keys` keyed states are read, and keys added, removed and changed are counted.
    Raises what `inspect` raises, and with `keys` what `read_state` raises.
    """
    before, now = inspect(old, open_store=open_store), inspect(new, open_store=open_store)
    uids = list(dict.fromkeys([*(o.uid for o in before.operators), *(o.uid for o in now.operators)]))
    comparison = _Comparison(before, now, open_store) if keys else None
    operators = tuple(_operator(before.operator(uid), now.operator(uid), uid, comparison) for uid in uids)
    return CheckpointDiff(before.path, now.path, (before.size_bytes, now.size_bytes), operators)


def _operator(
    old: OperatorReport | None, new: OperatorReport | None, uid: OperatorUid, comparison: _Comparison | None
) -> OperatorDiff:
    olds = {state.state: state for state in old.states} if old is not None else {}
    news = {state.state: state for state in new.states} if new is not None else {}
    names = dict.fromkeys([*olds, *news])
    states = tuple(_state(olds.get(name), news.get(name), comparison) for name in names)
    parallelism = (None if old is None else old.parallelism, None if new is None else new.parallelism)
    highest = (None if old is None else old.max_parallelism, None if new is None else new.max_parallelism)
    sizes = (old.size_bytes if old is not None else 0, new.size_bytes if new is not None else 0)
    if old is None or new is None:
        change: Change = "added" if old is None else "removed"
    else:
        is_same = parallelism[0] == parallelism[1] and highest[0] == highest[1] and sizes[0] == sizes[1]
        change = "same" if is_same and all(state.change == "same" for state in states) else "changed"
    return OperatorDiff(uid, change, parallelism, highest, sizes, states)


def _state(old: StateInfo | None, new: StateInfo | None, comparison: _Comparison | None) -> StateDiff:
    either = new or old
    assert either is not None, "a state of neither"
    sizes = (None if old is None else old.size_bytes, None if new is None else new.size_bytes)
    if old is None or new is None:
        change: Change = "added" if old is None else "removed"
    else:
        change = "same" if old == new else "changed"
    found = None
    if comparison is not None and either.kind is StateKind.KEYED and either.state:
        found = comparison.keys(either.uid, either.state, old, new)
        if found is not None and old is not None and new is not None:
            change = "changed" if found.added or found.removed or found.changed else "same"
    return StateDiff(either.uid, either.state, either.kind, change, sizes, found)


@dataclass(frozen=True, slots=True)
class _Comparison:
    old: CheckpointReport
    new: CheckpointReport
    open_store: OpenStore

    def keys(self, uid: OperatorUid, state: str, old: StateInfo | None, new: StateInfo | None) -> KeyChanges | None:
        before = None if old is None else self._selection(self.old, uid, state)
        now = None if new is None else self._selection(self.new, uid, state)
        if before is None or now is None:
            only = before or now
            assert only is not None
            rows = sum(batch.num_rows for batch in only.batches())
            return KeyChanges(rows, 0, 0, 0) if before is None else KeyChanges(0, rows, 0, 0)
        what = f"state {state!r} of operator {uid!r}"
        keys = now.keys or before.keys
        if keys is None:
            return None
        found = NO_CHANGES
        for groups in _parts(before, now, max(self.old.size_bytes, self.new.size_bytes)):
            found += compare_rows(before.reader(groups).read_all(), now.reader(groups).read_all(), keys, what)
        return found

    def _selection(self, report: CheckpointReport, uid: OperatorUid, state: str) -> StateSelection:
        store = self.open_store(parse_pointer(report.path).root)
        return StateSelection.find(store, report.metadata, uid, state)


def _parts(old: StateSelection, new: StateSelection, size_bytes: int) -> Iterator[range | None]:
    """Ranges of key groups to compare one after the other. None is all at once: a key may have different groups."""
    groups = old.operator.max_parallelism
    if groups != new.operator.max_parallelism:
        yield None
        return
    for info in (old.info, new.info):
        size_bytes = max(size_bytes if info.size_bytes is None else info.size_bytes, 1)
    parts = min(groups, 1 + size_bytes // PART_BYTES)
    for part in range(parts):
        yield range(part * groups // parts, (part + 1) * groups // parts)

"""Reads the state of one operator in one subtask of a checkpoint, from all the files that hold it.

Layers come from the base up, each marked with its number; then what was written whole, and what a backend wrote as
files of its own. Whoever applies the tables in this order has the state as it was.
"""

from __future__ import annotations

from collections.abc import Iterator

from tidegate.storage.checkpoints.metadata import NativeState, SectionRef, SubtaskState
from tidegate.storage.files.store import Store
from tidegate.storage.ids import OperatorUid
from tidegate.storage.state.key_groups import key_groups_meet
from tidegate.storage.state.snapshot import StateTable
from tidegate.storage.state.state_file import Wanted, iter_state, read_state
from tidegate.storage.subtasks.backend_files import read_native


def _any(_: SectionRef) -> bool:
    return True


def read_subtask_state(
    store: Store,
    subtask: SubtaskState,
    uid: OperatorUid,
    key_groups: range | None = None,
    *,
    wanted: Wanted = _any,
    readers: int = 1,
) -> list[StateTable]:
    """The tables of one operator that are `wanted`, verified; of keyed state only the rows of `key_groups`.

    Up to `readers` threads read at a time. Raises CorruptionError, NotFoundError, CodecError if a newer tidegate wrote
    the state, or StorageError if files of a backend cannot be kept on this machine while they are read.
    """
    tables: list[StateTable] = []
    for layer, handle in subtask.marked_handles:
        tables += read_state(store, handle, uid, key_groups, wanted=wanted, layer=layer, readers=readers)
    for native in _native_states(subtask, uid, key_groups):
        tables += read_native(store, native, key_groups)
    return tables


def iter_subtask_state(
    store: Store,
    subtask: SubtaskState,
    uid: OperatorUid,
    key_groups: range | None = None,
    *,
    wanted: Wanted = _any,
    scratch_dir: str | None = None,
    readers: int = 1,
) -> Iterator[StateTable]:
    """`read_subtask_state` one table after the other: no more is held than one read of a file for each reader. Files of
    a backend are kept in `scratch_dir` meanwhile.
    """
    for layer, handle in subtask.marked_handles:
        yield from iter_state(store, handle, uid, key_groups, wanted=wanted, layer=layer, readers=readers)
    for native in _native_states(subtask, uid, key_groups):
        yield from read_native(store, native, key_groups, scratch_dir)


def _native_states(subtask: SubtaskState, uid: OperatorUid, key_groups: range | None) -> Iterator[NativeState]:
    for native in subtask.native:
        if native.uid == uid and (key_groups is None or key_groups_meet(range(*native.key_groups), key_groups)):
            yield native


def operators_with_state(subtask: SubtaskState) -> frozenset[OperatorUid]:
    """Operators of which a subtask has rows."""
    sections = (section for handle in subtask.state_handles for section in handle.sections)
    return frozenset(section.uid for section in sections) | {native.uid for native in subtask.native}

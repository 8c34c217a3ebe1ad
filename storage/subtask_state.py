"""The state of one operator in one subtask of a checkpoint, from all that it lies in.

Layers come from the base up, each marked with its number; then what was written whole, and what a backend wrote as
files of its own. Whoever applies the tables in this order has the state as it was.
"""

from __future__ import annotations

from tidegate.storage.errors import CorruptionError
from tidegate.storage.ids import OperatorUid
from tidegate.storage.metadata import NativeState, SectionRef, SubtaskState
from tidegate.storage.state import StateTable
from tidegate.storage.state_file import Wanted, read_state
from tidegate.storage.store import Store


def _any(_: SectionRef) -> bool:
    return True


def read_subtask_state(
    store: Store, subtask: SubtaskState, uid: OperatorUid, key_groups: range | None = None, *, wanted: Wanted = _any
) -> list[StateTable]:
    """The tables of one operator that are `wanted`, verified; of keyed state only the rows of `key_groups`.

    Raises CorruptionError, NotFoundError, or CodecError if a newer tidegate wrote the state.
    """
    tables: list[StateTable] = []
    for layer, handle in enumerate(subtask.layers):
        tables += read_state(store, handle, uid, key_groups, wanted=wanted, layer=layer)
    if subtask.handle is not None:
        tables += read_state(store, subtask.handle, uid, key_groups, wanted=wanted)
    for native in subtask.native:
        if native.uid == uid and (key_groups is None or _meet(range(*native.key_groups), key_groups)):
            tables += native_tables(store, native, key_groups)
    return tables


def native_tables(store: Store, native: NativeState, key_groups: range | None = None) -> list[StateTable]:
    """Rows of some key groups of what a backend wrote as files of its own. CorruptionError, NotFoundError."""
    raise CorruptionError(
        f"operator {native.uid!r} has {len(native.files)} files of the state backend {native.backend!r} under "
        f"{store.url}, which this tidegate cannot read"
    )


def operators_with_state(subtask: SubtaskState) -> frozenset[OperatorUid]:
    """Operators of which a subtask has rows."""
    sections = (section for handle in subtask.state_handles for section in handle.sections)
    return frozenset(section.uid for section in sections) | {native.uid for native in subtask.native}


def _meet(one: range, other: range) -> bool:
    return one.start < other.stop and other.start < one.stop

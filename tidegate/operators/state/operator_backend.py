"""Opens the state backend of one operator, and freezes it for a snapshot as the backend's options say."""

from __future__ import annotations

from collections.abc import Sequence

from tidegate.operators.operator import OperatorContext
from tidegate.state.common.backend import KeyedBackend
from tidegate.state.common.options import BackendPlace
from tidegate.state.factory import open_backend
from tidegate.storage.state.key_groups import key_group_range
from tidegate.storage.state.snapshot import Cut, OperatorSnapshot


def make_backend(context: OperatorContext, key_names: Sequence[str], namespace: bool = False) -> KeyedBackend:
    """The keyed state of an operator in this subtask; `key_names` are its key columns.

    With `namespace` the first one is a namespace (`BackendPlace`).

    Empty, unless it comes from the attempt before.
    """
    if context.kept is not None:
        return context.kept
    groups = key_group_range(context.subtask, context.max_parallelism, context.parallelism)
    place = BackendPlace(context.uid, tuple(key_names), context.max_parallelism, groups, namespace)
    return open_backend(context.backend, place)


def frozen_backend(context: OperatorContext, backend: KeyedBackend, cut: Cut) -> OperatorSnapshot:
    """Freeze all states of a backend, in the form that its options say: files of its own, layers, or whole states."""
    if not cut.keyed:
        return OperatorSnapshot(context.uid)
    if context.backend.kind == "rocksdb" and not cut.canonical and not context.backend.changelog:
        return OperatorSnapshot(context.uid, native=backend.freeze_native(cut))
    frozen = tuple(backend.freeze(cut))
    if context.backend.incremental:
        return OperatorSnapshot(context.uid, layer=frozen)
    return OperatorSnapshot(context.uid, frozen)

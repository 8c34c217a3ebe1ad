"""Lists the states of a checkpoint, from its metadata alone, and finds the one that somebody asks for.

The error for a wrong name suggests the nearest one and lists all. A state without rows leaves nothing in a checkpoint,
so it looks like one that never was.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches

from tidegate.storage.checkpoints.metadata import (
    CheckpointMetadata,
    NativeState,
    OperatorInfo,
    SectionRef,
    StateKind,
    SubtaskState,
)
from tidegate.storage.errors import CodecError, ConfigurationError
from tidegate.storage.ids import OperatorUid

_LISTED_MAX = 50


@dataclass(frozen=True, slots=True)
class StateInfo:
    """One state of one operator, over all subtasks.

    `rows` is None if only reading the state could tell: it lies in layers, or in files of a backend. `size_bytes` is
    None if it shares files with other states. `state` is empty if files of a backend cannot be read by this version.
    """

    uid: OperatorUid
    state: str
    kind: StateKind
    rows: int | None
    size_bytes: int | None
    subtasks: int
    layers: int = 0
    """The most layers that it has in one subtask; 0 if it was written whole."""
    backend: str | None = None
    """The backend whose own files hold it; None if it is in state files."""


def states_of(metadata: CheckpointMetadata) -> tuple[StateInfo, ...]:
    """All states of a checkpoint, by uid, then in the order in which they were written."""
    found: dict[tuple[OperatorUid, str], StateInfo] = {}
    for subtask in metadata.subtasks:
        for info in _states_in(subtask):
            before = found.get((info.uid, info.state))
            found[info.uid, info.state] = info if before is None else _added(before, info)
    return tuple(sorted(found.values(), key=lambda info: info.uid))


def find_state(metadata: CheckpointMetadata, uid: str, state: str | None) -> tuple[OperatorInfo, StateInfo]:
    """The operator of a uid, and its state of that name. With `state` None, the only state that it has.

    ConfigurationError, which lists what the checkpoint holds, if there is no such operator or state.
    """
    states = states_of(metadata)
    where = f"checkpoint {metadata.checkpoint_id} of job {metadata.job_id}"
    operator = next((info for info in metadata.operators if info.uid == uid), None)
    if operator is None:
        by_name = [info.uid for info in metadata.operators if info.name == uid]
        near = by_name or get_close_matches(uid, [info.uid for info in metadata.operators], 1, 0.5)
        raise ConfigurationError(
            f"{where} has no operator of uid {uid!r}{_meant(near)} {_holdings(metadata.operators, states)}"
        )
    own = [info for info in states if info.uid == uid]
    if state is None and len(own) == 1:
        return operator, own[0]
    if state is None and own:
        raise ConfigurationError(
            f"operator {uid!r} of {where} has several states: say which by state=, one of {_names(own)}"
        )
    chosen = next((info for info in own if info.state == state), None)
    if chosen is None:
        near = get_close_matches(state or "", [info.state for info in own], 1, 0.5)
        what = "no state" if state is None else f"no state {state!r}"
        subtasks = [subtask for subtask in metadata.subtasks if subtask.vertex == operator.vertex]
        finished = sum(subtask.finished for subtask in subtasks)
        over = (
            f" ({finished} of its {len(subtasks)} subtasks had finished, and what has finished keeps no state: read an "
            "earlier checkpoint)"
            if finished
            else ""
        )
        raise ConfigurationError(
            f"operator {uid!r} has {what} with rows in {where}{over}{_meant(near)} "
            f"{_holdings(metadata.operators, states)}"
        )
    return operator, chosen


def _states_in(subtask: SubtaskState) -> Iterator[StateInfo]:
    layered: dict[tuple[OperatorUid, str], list[SectionRef]] = {}
    for handle in subtask.layers:
        for section in handle.sections:
            layered.setdefault((section.uid, section.state), []).append(section)
    for (uid, state), sections in layered.items():
        written_bytes = sum(section.length_bytes for section in sections)
        rows = sections[0].rows if len(sections) == 1 and not sections[0].removed else None
        yield StateInfo(uid, state, sections[0].kind, rows, written_bytes, 1, layers=len(sections))
    for section in () if subtask.handle is None else subtask.handle.sections:
        yield StateInfo(section.uid, section.state, section.kind, section.rows, section.length_bytes, 1)
    for native in subtask.native:
        names = native_states(native)
        for name in names:
            size_bytes = native.size_bytes if len(names) == 1 else None
            yield StateInfo(native.uid, name, StateKind.KEYED, None, size_bytes, 1, backend=native.backend)


def native_states(native: NativeState) -> tuple[str, ...]:
    """Returns the names of the states in the files of a backend, or one empty name if this version cannot read them."""
    # Imported late: only RocksDB has such files, and its library is large.
    from tidegate.storage.rocksdb.value_layout import describe

    try:
        return tuple(state.name for state in describe(native).states)
    except CodecError:
        return ("",)


def _added(one: StateInfo, other: StateInfo) -> StateInfo:
    def total(first: int | None, second: int | None) -> int | None:
        return None if first is None or second is None else first + second

    return StateInfo(
        one.uid,
        one.state,
        one.kind,
        total(one.rows, other.rows),
        total(one.size_bytes, other.size_bytes),
        one.subtasks + other.subtasks,
        max(one.layers, other.layers),
        one.backend or other.backend,
    )


def _meant(near: Iterable[str]) -> str:
    return "".join(f"; did you mean {name!r}?" for name in near) or "."


def _names(states: Iterable[StateInfo]) -> str:
    return ", ".join(f"{info.state!r} ({info.kind.value})" for info in states)


def _holdings(operators: Iterable[OperatorInfo], states: Iterable[StateInfo]) -> str:
    of: dict[str, list[StateInfo]] = {info.uid: [] for info in operators}
    for info in states:
        of.setdefault(info.uid, []).append(info)
    lines = [f"{uid!r} with {_names(own) if own else 'no state'}" for uid, own in sorted(of.items())]
    more = f"; and {len(lines) - _LISTED_MAX} more operators" if len(lines) > _LISTED_MAX else ""
    return "It holds: " + "; ".join(lines[:_LISTED_MAX]) + more

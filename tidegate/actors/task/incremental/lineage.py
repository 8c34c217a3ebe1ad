"""Decides what a snapshot of a subtask may be built on: its parts of earlier checkpoints.

`SubtaskCheckpoints` asks it when a snapshot is taken. Rules:

- A snapshot is built only on the checkpoint that its barrier names: the coordinator keeps the files of that one.
- A stack has few layers, and those above the base are together no larger than the base. Else the next snapshot is whole
  and begins a new stack. So a restore reads, and storage holds, at most about twice the state.
- If most rows have changed since the base, a snapshot is whole, too: it writes less than twice as much, and a restore
  reads each row once.
- A canonical savepoint is whole and has no file in common with anything; nothing is built on it. A native one is like
  any checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tidegate.protocol.stream_elements import Barrier
from tidegate.storage.checkpoints.metadata import NativeState, StateHandle, StateKind, SubtaskState
from tidegate.storage.codec import wire
from tidegate.storage.ids import CheckpointId
from tidegate.storage.state.canonical import FrozenCanonical
from tidegate.storage.state.snapshot import Cut, OperatorSnapshot

LAYERS_MAX = 10
"""Layers of a stack, its base among them."""
DELTAS_BYTES_MIN = 64 * 1024
"""So much may lie above a base, however small the base is."""
CHANGED_ROWS_MIN = 4096
"""So few changes are always an increment, whatever share of the state they are."""
LINEAGES_MAX = 16
"""Checkpoints whose part a subtask remembers: those that may be pending, and a few whose end it never heard of."""


ChangedRows = Callable[[CheckpointId], tuple[int, int]]
"""For a base: about how many rows an increment on it would hold, and how many the whole state has."""


@wire
@dataclass(frozen=True, slots=True)
class Lineage:
    """The shared part of what a subtask has in a checkpoint: layers of keyed state, and files of its backends."""

    checkpoint_id: CheckpointId
    layers: tuple[StateHandle, ...] = ()
    native: tuple[NativeState, ...] = ()

    @staticmethod
    def of(checkpoint_id: CheckpointId, state: SubtaskState) -> Lineage:
        """From a subtask's part of a checkpoint.

        Older versions wrote timers beside the layers, not into them. So the next snapshot begins a new stack.
        """
        sections = () if state.handle is None else state.handle.sections
        complete = not any(section.kind is StateKind.KEYED for section in sections)
        return Lineage(checkpoint_id, state.layers if complete else (), state.native)

    @property
    def extensible(self) -> bool:
        """Whether a snapshot can and should be built on it."""
        if not self.layers:
            return bool(self.native)
        base_bytes, *deltas_bytes = (layer.size_bytes for layer in self.layers)
        return len(self.layers) < LAYERS_MAX and sum(deltas_bytes) <= max(base_bytes, DELTAS_BYTES_MIN)

    @property
    def paths(self) -> frozenset[str]:
        """Every file."""
        layers = (layer.path for layer in self.layers if layer.path is not None)
        return frozenset((*layers, *(file.path for state in self.native for file in state.files)))


class Lineages:
    """The checkpoints that the next snapshots of one subtask can be built on."""

    def __init__(self) -> None:
        self._known: dict[CheckpointId, Lineage] = {}

    def remember(self, lineage: Lineage) -> None:
        """The subtask was restored from this, or has acknowledged it."""
        if lineage.layers or lineage.native:
            self._known[lineage.checkpoint_id] = lineage
            if len(self._known) > LINEAGES_MAX:
                del self._known[min(self._known)]

    def forget(self, checkpoint_id: CheckpointId) -> None:
        """The checkpoint was given up."""
        self._known.pop(checkpoint_id, None)

    def begin(self, barrier: Barrier, finished: bool, changed_rows: ChangedRows) -> tuple[Cut, Lineage | None]:
        """What the snapshot of this barrier is to hold, and what it is built on. `finished`: there is no state."""
        if barrier.options.canonical:
            return Cut(barrier.checkpoint_id, canonical=True), None
        if barrier.base is None:
            return Cut(barrier.checkpoint_id), None
        # Later barriers name no older base.
        base_id = barrier.base
        self._known = {number: lineage for number, lineage in self._known.items() if number >= base_id}
        base = self._known.get(base_id)
        if base is None or not base.extensible or finished or _mostly(*changed_rows(base_id)):
            return Cut(barrier.checkpoint_id), None
        return Cut(barrier.checkpoint_id, base_id), base


def _mostly(changed: int, rows: int) -> bool:
    """Whether most rows have changed, and they are many."""
    return changed > CHANGED_ROWS_MIN and 2 * changed > rows


def canonical(snapshot: OperatorSnapshot) -> OperatorSnapshot:
    """The snapshot as a canonical savepoint has it: states by name in one file, keyed ones in canonical form."""
    states = sorted((*snapshot.states, *snapshot.layer), key=lambda frozen: frozen.state)
    keyed = (FrozenCanonical(frozen) if frozen.kind is StateKind.KEYED else frozen for frozen in states)
    return replace(snapshot, states=tuple(keyed), layer=())

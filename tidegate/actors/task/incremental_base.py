"""The possible bases of a snapshot: the layers of an earlier checkpoint (`IncrementalBase`), or a changelog
(`ChangeLog`).
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tidegate.protocol.stream_elements import Barrier
from tidegate.storage.checkpoints.metadata import NativeState, StateHandle, StateKind, SubtaskState
from tidegate.storage.codec import wire
from tidegate.storage.errors import ProtocolError
from tidegate.storage.ids import CheckpointId
from tidegate.storage.state.canonical import FrozenCanonical
from tidegate.storage.state.snapshot import Cut, OperatorSnapshot

LAYERS_MAX = 10
"""Limit of layers on top of each other, including the base."""
DELTAS_BYTES_MIN = 64 * 1024
"""Size in bytes that increments may have in any case, however small their base is."""
CHANGED_ROWS_MIN = 4096
"""Number of changed rows up to which a snapshot is always an increment, whatever share of the state they are."""
LINEAGES_MAX = 16
"""Limit of checkpoints that a subtask remembers as bases: pending ones, and a few whose outcome is unknown."""
ChangedRows = Callable[[CheckpointId], tuple[int, int]]
"""A function that returns, for a base, about how many rows an increment would have, and how many the whole
state has.
"""


@wire
@dataclass(frozen=True, slots=True)
class IncrementalBase:
    """The part of a subtask's checkpoint on which later ones can be built: layers of keyed state, and files of its
    backends."""

    checkpoint_id: CheckpointId
    layers: tuple[StateHandle, ...] = ()
    native: tuple[NativeState, ...] = ()

    @staticmethod
    def of(checkpoint_id: CheckpointId, state: SubtaskState) -> IncrementalBase:
        """Returns the base for a subtask's part of a checkpoint.

        Older versions wrote timers next to the layers, not into them. The next snapshot then starts a new stack.
        """
        sections = () if state.handle is None else state.handle.sections
        complete = not any(section.kind is StateKind.KEYED for section in sections)
        return IncrementalBase(checkpoint_id, state.layers if complete else (), state.native)

    @property
    def extensible(self) -> bool:
        """Returns whether a snapshot can and should be based on it."""
        if not self.layers:
            return bool(self.native)
        base_bytes, *deltas_bytes = (layer.size_bytes for layer in self.layers)
        return len(self.layers) < LAYERS_MAX and sum(deltas_bytes) <= max(base_bytes, DELTAS_BYTES_MIN)

    @property
    def paths(self) -> frozenset[str]:
        """Returns the paths of all its files."""
        layers = (layer.path for layer in self.layers if layer.path is not None)
        return frozenset((*layers, *(file.path for state in self.native for file in state.files)))


class IncrementalBases:
    """Decides which parts of earlier checkpoints a snapshot of a subtask may be built on. `SubtaskCheckpoints` calls it
    when a snapshot is taken. Rules:

    - A snapshot is built only on the checkpoint that its barrier names: the coordinator keeps the files of that one.
    - A stack has few layers, and those above the base are together no larger than the base. Else the next snapshot is
      whole and begins a new stack. So a restore reads, and storage holds, at most about twice the state.
    - If most rows have changed since the base, a snapshot is whole, too: it writes less than twice as much, and a
      restore reads each row once.
    - A canonical savepoint is whole and has no file in common with anything; nothing is built on it. A native one is
      like any checkpoint.

    The checkpoints that the next snapshots of one subtask can be built on.
    """

    def __init__(self) -> None:
        self._known: dict[CheckpointId, IncrementalBase] = {}

    def remember(self, lineage: IncrementalBase) -> None:
        """Remembers a part of a checkpoint: the subtask was restored from it, or has acknowledged it."""
        if lineage.layers or lineage.native:
            self._known[lineage.checkpoint_id] = lineage
            if len(self._known) > LINEAGES_MAX:
                del self._known[min(self._known)]

    def forget(self, checkpoint_id: CheckpointId) -> None:
        """Forgets a checkpoint that was aborted."""
        self._known.pop(checkpoint_id, None)

    def begin(self, barrier: Barrier, finished: bool, changed_rows: ChangedRows) -> tuple[Cut, IncrementalBase | None]:
        """Returns what the snapshot for a barrier has to contain (`Cut`), and its base. `finished` is whether there is
        no state.
        """
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
    """Returns whether most rows of the state, and enough of them, have changed."""
    return changed > CHANGED_ROWS_MIN and 2 * changed > rows


def canonical(snapshot: OperatorSnapshot) -> OperatorSnapshot:
    """Returns the snapshot in the form of a canonical savepoint: states by name in one file, keyed states sorted."""
    states = sorted((*snapshot.states, *snapshot.layer), key=lambda frozen: frozen.state)
    keyed = (FrozenCanonical(frozen) if frozen.kind is StateKind.KEYED else frozen for frozen in states)
    return replace(snapshot, states=tuple(keyed), layer=())


@dataclass(frozen=True, slots=True)
class ChangelogLimits:
    """Limits at which the changelog writes a segment before a checkpoint needs it, and at which it writes a new
    base.
    """

    segment_bytes: int = 1024 * 1024
    """Size in bytes of changes that are written without waiting for a checkpoint."""
    in_flight_max: int = 2
    """Limit of segments in flight when another one is written before a checkpoint needs it."""
    layers_max: int = 64
    """Number of layers of a chain at which the whole state is written."""
    ratio_max: float = 1.0
    """Total size of all segments, as a multiple of the base's size, at which the whole state is written."""
    bytes_min: int = 256 * 1024
    """Total size in bytes of segments below which no new base is written."""

    @staticmethod
    def of(segment_bytes: int) -> ChangelogLimits:
        """Returns limits that suit segments of this size."""
        return ChangelogLimits(segment_bytes=segment_bytes, bytes_min=segment_bytes // 4)


class _Condition(enum.Enum):
    WRITING = "writing"
    DURABLE = "durable"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class Layer:
    """A segment or a base of the changelog. `handles` are its files once it is durable (a base that was restored has
    several).
    """

    number: int
    whole: bool
    condition: _Condition = _Condition.WRITING
    handles: tuple[StateHandle, ...] = ()
    taken: bool = False
    """True if a snapshot has the layer in its chain. The coordinator then deletes it."""
    size_bytes: int = 0
    """Size of its files in bytes. Stored, because every event of the task reads it."""

    def durable(self, handles: tuple[StateHandle, ...]) -> None:
        """Sets the files of a layer that was written."""
        self.condition = _Condition.DURABLE
        self.handles = handles
        self.size_bytes = sum(handle.size_bytes for handle in handles)


@dataclass(frozen=True, slots=True)
class Chain:
    """The layers of one snapshot, starting with the base."""

    layers: tuple[Layer, ...]

    @property
    def durable(self) -> bool:
        """Returns whether all layers are written."""
        return all(layer.condition is _Condition.DURABLE for layer in self.layers)

    @property
    def failed(self) -> bool:
        """Returns whether a layer could not be written."""
        return any(layer.condition is _Condition.FAILED for layer in self.layers)

    @property
    def handles(self) -> tuple[StateHandle, ...]:
        """Returns the files of all layers, starting with the base. The chain must be durable."""
        assert self.durable, "a chain was used before all of it was written"
        return tuple(handle for layer in self.layers for handle in layer.handles)


@dataclass(slots=True)
class ChangeLog:
    """Changes of a task's keyed state, written all the time, so that a checkpoint has little left to write.

    Changes are frozen and written in numbered segments. Each has what has changed since the one before it. A checkpoint
    seals the newest segment. It refers to a base and to all segments above it: layers, as in incremental checkpoints.
    From time to time the whole state is written anew while processing continues (Flink: materialised), frozen at the
    same moment as a segment. Once it is durable it is the base, and everything below it is dropped.

    `ChangelogWriter` calls it to find what to write, and freezes that. Rules:

    - What was dropped from a chain never returns. So a file may go with the last checkpoint that refers to it: the
      coordinator counts those. A file that no snapshot has taken into its chain is the task's own to delete.
    - If there is nothing to build on, the next thing written is a base: at the beginning, and after a segment that
      could not be written.
    - Segments in flight that no checkpoint needs are bounded, and so are the layers of a chain. After a failure the
      state is not written whole before a snapshot needs it. If base after base fails, a snapshot waits for one in the
      end.

    The class holds base and segments of one task. `restored` are the layers of the checkpoint from which the task
    starts, if any.
    """

    restored: tuple[StateHandle, ...] = ()
    limits: ChangelogLimits = field(default_factory=ChangelogLimits)
    _newest: int = 0
    _base: Layer | None = None
    _segments: list[Layer] = field(default_factory=list)
    _coming: Layer | None = None
    """A base that is being written while the old one is still used, or None."""
    _left_out: list[Layer] = field(default_factory=list)
    """Layers that were dropped while they were being written. Only older snapshots may contain them."""
    _paused: bool = False
    """True if a write has failed since the last snapshot was taken."""
    _discarded: list[StateHandle] = field(default_factory=list)
    """Files that the task has to delete and that were not returned yet."""

    def __post_init__(self) -> None:
        if self.restored:
            self._base = Layer(0, True, taken=True)
            self._base.durable(self.restored)

    @property
    def chain(self) -> Chain:
        """Returns the base and all segments on top of it. `take` returns it for a snapshot."""
        assert self._base is not None, "seal before"
        return Chain((self._base, *self._segments))

    def wants_segment(self, changed_bytes: int) -> bool:
        """Returns whether to write a segment now, given that about `changed_bytes` have changed."""
        if self._base is None and self._paused:
            return False
        in_flight = sum(layer.condition is _Condition.WRITING for layer in self._segments)
        return changed_bytes >= self.limits.segment_bytes and in_flight < self.limits.in_flight_max

    def wants_base(self) -> bool:
        """Returns whether to write the whole state now, while processing continues."""
        base = self._base
        if base is None or base.condition is not _Condition.DURABLE or self._coming is not None or self._paused:
            return False
        bytes_above = sum(layer.size_bytes for layer in self._segments)
        large = bytes_above > max(self.limits.bytes_min, self.limits.ratio_max * base.size_bytes)
        return large or self._layers >= self.limits.layers_max

    def seal(self) -> Cut:
        """Starts a segment with all changes since the last one, or a base if there is nothing to build on.

        It is a base, too, if bases have failed until there are far too many layers. The snapshot has to wait for it.
        """
        if self._paused and self._coming is None and self._layers >= 2 * self.limits.layers_max:
            self._discarded += self._start_anew()
        return self._begin()

    def _begin(self) -> Cut:
        self._newest += 1
        if self._base is None:
            self._base = Layer(self._newest, whole=True)
            return Cut(CheckpointId(self._newest))
        self._segments.append(Layer(self._newest, whole=False))
        return Cut(CheckpointId(self._newest), base=CheckpointId(self._newest - 1))

    def seal_with_base(self) -> tuple[Cut, Cut]:
        """Starts a segment and a base of the same moment. Freeze them in this order, with no change in between."""
        assert self._base is not None and self._coming is None
        segment = self._begin()
        self._coming = Layer(self._newest, whole=True)
        return segment, Cut(segment.checkpoint_id)

    def start_anew(self) -> None:
        """Drops all layers, so that the next write is a base with the whole state."""
        self._discarded += self._start_anew()

    def take(self) -> Chain:
        """Returns the chain (base and segments) for a snapshot whose segment was just sealed, and marks its layers as
        taken, so that this task no longer deletes them.
        """
        self._paused = False
        chain = self.chain
        for layer in chain.layers:
            layer.taken = True
        return chain

    def written(self, number: int, whole: bool, handle: StateHandle | None) -> list[StateHandle]:
        """Records that a segment or a base is durable (None if it was empty). Returns the files that the task has to
        delete now.
        """
        layer = self._find(number, whole)
        layer.durable(() if handle is None else (handle,))
        if layer in self._left_out:
            self._left_out.remove(layer)
            return self._taken_over() + _own([layer])
        return self._taken_over() + (self._replace_base() if layer is self._coming else [])

    def failed(self, number: int, whole: bool) -> list[StateHandle]:
        """Records that a segment or a base could not be written. Returns the files that the task has to delete now."""
        layer = self._find(number, whole)
        layer.condition = _Condition.FAILED
        self._paused = True
        if layer in self._left_out:
            self._left_out.remove(layer)
            return self._taken_over()
        if layer is self._coming:
            self._coming = None
        return self._taken_over() + self._start_anew_if_broken()

    @property
    def _layers(self) -> int:
        return 0 if self._base is None else len(self._base.handles) + len(self._segments)

    def _taken_over(self) -> list[StateHandle]:
        discarded = self._discarded
        self._discarded = []
        return discarded

    def _find(self, number: int, whole: bool) -> Layer:
        known = (self._base, self._coming, *self._segments, *self._left_out)
        for layer in known:
            if layer is not None and (layer.number, layer.whole) == (number, whole):
                if layer.condition is _Condition.WRITING:
                    return layer
                break
        raise ProtocolError(f"segment {number} of the changelog is not being written")

    def _replace_base(self) -> list[StateHandle]:
        base = self._coming
        self._coming = None
        assert base is not None and self._base is not None
        below = [self._base, *(layer for layer in self._segments if layer.number <= base.number)]
        self._base = base
        self._segments = [layer for layer in self._segments if layer.number > base.number]
        return self._leave_out(below) + self._start_anew_if_broken()

    def _start_anew_if_broken(self) -> list[StateHandle]:
        """Starts a new stack after a failed layer, because nothing can be based on it, unless a base of the same or a
        later moment may still be written.
        """
        layers = [layer for layer in (self._base, *self._segments) if layer is not None]
        broken = [layer.number for layer in layers if layer.condition is _Condition.FAILED]
        if not broken or (self._coming is not None and self._coming.number >= max(broken)):
            return []
        return self._start_anew()

    def _start_anew(self) -> list[StateHandle]:
        layers = [layer for layer in (self._base, *self._segments, self._coming) if layer is not None]
        self._base = None
        self._segments = []
        self._coming = None
        return self._leave_out(layers)

    def _leave_out(self, layers: list[Layer]) -> list[StateHandle]:
        self._left_out += [layer for layer in layers if layer.condition is _Condition.WRITING]
        return _own(layers)


def _own(layers: list[Layer]) -> list[StateHandle]:
    return [handle for layer in layers if not layer.taken for handle in layer.handles]

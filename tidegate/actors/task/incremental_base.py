"""The possible bases of a snapshot: the layers of an earlier checkpoint (`IncrementalBase`), or a changelog
(`ChangeLog`).

A layer is a file with the changes of keyed state since the layer below it. The lowest layer, the base, has the whole
state.
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
"""Limit of the layers of a checkpoint, including the base."""
DELTAS_BYTES_MIN = 64 * 1024
"""Total size in bytes that increments may always have, however small their base is."""
CHANGED_ROWS_MIN = 4096
"""Number of changed rows up to which a snapshot is always incremental, however large their share of the state is."""
LINEAGES_MAX = 16
"""Limit of checkpoints that a subtask remembers as possible bases: pending ones, and a few whose outcome is
unknown.
"""
ChangedRows = Callable[[CheckpointId], tuple[int, int]]
"""A function that returns, for a base, the approximate number of rows of an increment, and of the whole state."""


@wire
@dataclass(frozen=True, slots=True)
class IncrementalBase:
    """A subtask's part of a checkpoint on which later snapshots can be based: layers of keyed state, and files of
    its backends.
    """

    checkpoint_id: CheckpointId
    layers: tuple[StateHandle, ...] = ()
    native: tuple[NativeState, ...] = ()

    @staticmethod
    def of(checkpoint_id: CheckpointId, state: SubtaskState) -> IncrementalBase:
        """Returns the base for a subtask's part of a checkpoint."""
        return IncrementalBase(checkpoint_id, state.layers, state.native)

    @property
    def extensible(self) -> bool:
        """Returns whether a snapshot can be based on this one.

        False if this one has too many increments, or too large ones.
        """
        if not self.layers:
            return bool(self.native)
        base_bytes, *deltas_bytes = (layer.size_bytes for layer in self.layers)
        return len(self.layers) < LAYERS_MAX and sum(deltas_bytes) <= max(base_bytes, DELTAS_BYTES_MIN)

    @property
    def paths(self) -> frozenset[str]:
        """Returns the paths of all files to which the base refers."""
        layers = (layer.path for layer in self.layers if layer.path is not None)
        return frozenset((*layers, *(file.path for state in self.native for file in state.files)))


class IncrementalBases:
    """The checkpoints on which the next snapshots of one subtask can be based.

    `SubtaskCheckpoints` calls it when a snapshot is taken. Rules:

    - A snapshot is based only on the checkpoint that its barrier names, because the coordinator keeps the files of that
      checkpoint.
    - A checkpoint has few layers, and the increments are together no larger than the base. Otherwise the next snapshot
      contains the whole state. So a restore reads, and storage contains, at most about twice the state.
    - If most rows have changed since the base, a snapshot contains the whole state, too: it writes less than twice as
      much, and a restore reads each row once.
    - A canonical savepoint contains the whole state and shares no file, and no snapshot is based on it. A native
      savepoint is like any checkpoint.
    """

    def __init__(self) -> None:
        self._known: dict[CheckpointId, IncrementalBase] = {}

    def remember(self, lineage: IncrementalBase) -> None:
        """Stores this subtask's part of a checkpoint as a possible base.

        The subtask was restored from the part, or has acknowledged it.
        """
        if lineage.layers or lineage.native:
            self._known[lineage.checkpoint_id] = lineage
            if len(self._known) > LINEAGES_MAX:
                del self._known[min(self._known)]

    def forget(self, checkpoint_id: CheckpointId) -> None:
        """Removes a checkpoint that was aborted from the possible bases."""
        self._known.pop(checkpoint_id, None)

    def begin(self, barrier: Barrier, finished: bool, changed_rows: ChangedRows) -> tuple[Cut, IncrementalBase | None]:
        """Returns which changes the snapshot for a barrier has to contain (`Cut`), and its base, or None for the whole
        state.

        `finished`: the task has no state, because its operators have finished.
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
    """Returns the snapshot in canonical form: states sorted by name in one file, keyed states with sorted rows."""
    states = sorted((*snapshot.states, *snapshot.layer), key=lambda frozen: frozen.state)
    keyed = (FrozenCanonical(frozen) if frozen.kind is StateKind.KEYED else frozen for frozen in states)
    return replace(snapshot, states=tuple(keyed), layer=())


@dataclass(frozen=True, slots=True)
class ChangelogLimits:
    """Limits at which the changelog writes a segment without waiting for a checkpoint, and at which it writes a
    new base.
    """

    segment_bytes: int = 1024 * 1024
    """Size in bytes of changes after which a segment is written without waiting for a checkpoint."""
    in_flight_max: int = 2
    """Number of segments in flight from which on no further one is written before a checkpoint needs it."""
    layers_max: int = 64
    """Number of layers at which a new base with the whole state is written."""
    ratio_max: float = 1.0
    """Total size of the segments, as a multiple of the base's size, above which a new base is written."""
    bytes_min: int = 256 * 1024
    """Total size in bytes of the segments below which no new base is written."""

    @staticmethod
    def of(segment_bytes: int) -> ChangelogLimits:
        """Returns limits that suit segments of this size in bytes."""
        return ChangelogLimits(segment_bytes=segment_bytes, bytes_min=segment_bytes // 4)


class _Condition(enum.Enum):
    WRITING = "writing"
    DURABLE = "durable"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class Layer:
    """A segment or a base (`whole`) of the changelog.

    `handles` are its files once it is durable. A restored base has several.
    """

    number: int
    whole: bool
    condition: _Condition = _Condition.WRITING
    handles: tuple[StateHandle, ...] = ()
    taken: bool = False
    """True if a snapshot refers to the layer. The coordinator then deletes its files."""
    size_bytes: int = 0
    """Size of its files in bytes. Stored, because every event of the task reads it."""

    def durable(self, handles: tuple[StateHandle, ...]) -> None:
        """Records that the layer is written to storage, as the files `handles`."""
        self.condition = _Condition.DURABLE
        self.handles = handles
        self.size_bytes = sum(handle.size_bytes for handle in handles)


@dataclass(frozen=True, slots=True)
class Chain:
    """The layers of the changelog to which one snapshot refers: the base first, then the segments."""

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
        """Returns the files of all layers, beginning with the base. All layers must be durable."""
        assert self.durable, "a chain was used before all of it was written"
        return tuple(handle for layer in self.layers for handle in layer.handles)


@dataclass(slots=True)
class ChangeLog:
    """The changelog of a task's keyed state, which is written all the time, so that a checkpoint has little left to
    write.

    Changes are frozen and written in numbered segments. Each segment has the changes since the previous one. A
    checkpoint seals the newest segment. It refers to a base and to all segments above it: layers, as in incremental
    checkpoints. From time to time the whole state is written as a new base while processing continues (Flink:
    materialised), frozen at the same moment as a segment. Once the new base is durable, everything below it is dropped.

    This class decides what to write, and `ChangelogWriter` freezes it. `restored` are the layers of the checkpoint from
    which the task starts, if any. Rules:

    - A dropped layer never returns. So a file may be deleted with the last checkpoint that refers to it, which the
      coordinator counts. The task itself deletes a file to which no snapshot refers.
    - If there is no base, the next write is a base: at the beginning, and after a segment that could not be written.
    - The number of segments in flight that no checkpoint needs is limited, and so is the number of layers. After a
      failure the whole state is not written before a snapshot needs it. If several bases fail, a snapshot finally waits
      for a base.
    """

    restored: tuple[StateHandle, ...] = ()
    limits: ChangelogLimits = field(default_factory=ChangelogLimits)
    _newest: int = 0
    _base: Layer | None = None
    _segments: list[Layer] = field(default_factory=list)
    _coming: Layer | None = None
    """A new base that is being written while the old one is still used, or None."""
    _left_out: list[Layer] = field(default_factory=list)
    """Layers that were dropped while they were being written. Only older snapshots may refer to them."""
    _paused: bool = False
    """True if a write has failed since the last snapshot was taken."""
    _discarded: list[StateHandle] = field(default_factory=list)
    """Files that the task has to delete and that no method has returned yet."""

    def __post_init__(self) -> None:
        if self.restored:
            self._base = Layer(0, True, taken=True)
            self._base.durable(self.restored)

    @property
    def chain(self) -> Chain:
        """Returns the base and all segments above it. A base must exist."""
        assert self._base is not None, "seal before"
        return Chain((self._base, *self._segments))

    def wants_segment(self, changed_bytes: int) -> bool:
        """Returns whether to write a segment now, given that about `changed_bytes` bytes have changed since the last
        one.
        """
        if self._base is None and self._paused:
            return False
        in_flight = sum(layer.condition is _Condition.WRITING for layer in self._segments)
        return changed_bytes >= self.limits.segment_bytes and in_flight < self.limits.in_flight_max

    @property
    def may_replace_base(self) -> bool:
        """Returns whether `seal_with_base` may be called: there is a base, and no other one is being written."""
        return self._base is not None and self._coming is None

    def wants_base(self) -> bool:
        """Returns whether to write a new base with the whole state now, while processing continues."""
        base = self._base
        if base is None or base.condition is not _Condition.DURABLE or self._coming is not None or self._paused:
            return False
        bytes_above = sum(layer.size_bytes for layer in self._segments)
        large = bytes_above > max(self.limits.bytes_min, self.limits.ratio_max * base.size_bytes)
        return large or self._layers >= self.limits.layers_max

    def seal(self) -> Cut:
        """Begins a segment with all changes since the last segment, or a base if there is none. Returns what it has to
        contain.

        After failed bases with too many layers, a base is begun as well, and the snapshot waits for the base.
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
        """Begins a segment and a new base for the same state. Returns what the segment and what the base have to
        contain.

        Freeze the segment first, and do not change the state before the base is frozen.
        """
        assert self.may_replace_base and self._base is not None
        segment = self._begin()
        self._coming = Layer(self._newest, whole=True)
        return segment, Cut(segment.checkpoint_id)

    def start_anew(self) -> None:
        """Drops all layers, so that the next write is a base with the whole state."""
        self._discarded += self._start_anew()

    def take(self) -> Chain:
        """Returns the layers for a snapshot whose segment was just sealed. This task no longer deletes their
        files.
        """
        self._paused = False
        chain = self.chain
        for layer in chain.layers:
            layer.taken = True
        return chain

    def written(self, number: int, whole: bool, handle: StateHandle | None) -> list[StateHandle]:
        """Records that a segment, or a base (`whole`), is durable. Returns the files that the task has to delete now.

        `handle` is None if the segment was empty.
        """
        layer = self._find(number, whole)
        layer.durable(() if handle is None else (handle,))
        if layer in self._left_out:
            self._left_out.remove(layer)
            return self._taken_over() + _own([layer])
        return self._taken_over() + (self._replace_base() if layer is self._coming else [])

    def failed(self, number: int, whole: bool) -> list[StateHandle]:
        """Records that a segment, or a base (`whole`), could not be written. Returns the files that the task has
        to delete now.
        """
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
        raise ProtocolError(
            f"the write of changelog segment {number} was answered, but it is not being written; this is a bug in "
            "tidegate, please report it"
        )

    def _replace_base(self) -> list[StateHandle]:
        base = self._coming
        self._coming = None
        assert base is not None and self._base is not None
        below = [self._base, *(layer for layer in self._segments if layer.number <= base.number)]
        self._base = base
        self._segments = [layer for layer in self._segments if layer.number > base.number]
        return self._leave_out(below) + self._start_anew_if_broken()

    def _start_anew_if_broken(self) -> list[StateHandle]:
        """Drops all layers after a failed layer, because no segment can be based on them. Returns the files to delete.

        Nothing is dropped if a base of the same or a later moment may still be written.
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

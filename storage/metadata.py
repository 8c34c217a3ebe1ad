"""What a checkpoint is made of: the types of `_metadata`, format version 1.

State belongs to operators (matched by uid), bytes belong to subtasks (one file each, or inlined when small). A
`StateHandle` ties the two together: it says where the bytes are and which section of them is which operator's.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from tidegate.storage.codec import wire
from tidegate.storage.ids import AttemptNumber, CheckpointId, JobId, OperatorUid, SubtaskIndex, VertexId

METADATA_VERSION = 1


@wire
class SnapshotKind(enum.Enum):
    """Why a snapshot is taken. SUSPEND and TERMINATE are the savepoints of `stop`, without and with drain."""

    CHECKPOINT = "checkpoint"
    SAVEPOINT = "savepoint"
    SUSPEND = "suspend"
    TERMINATE = "terminate"

    @property
    def is_savepoint(self) -> bool:
        """Whether the snapshot is the user's."""
        return self is not SnapshotKind.CHECKPOINT

    @property
    def stops(self) -> bool:
        """Whether the job ends after it."""
        return self in (SnapshotKind.SUSPEND, SnapshotKind.TERMINATE)


@wire
class StateKind(enum.Enum):
    """How a state is split when the parallelism changes."""

    KEYED = "keyed"
    LIST = "list"
    UNION = "union"
    BROADCAST = "broadcast"


@wire
@dataclass(frozen=True, slots=True)
class SectionRef:
    """Where one state of one operator lies inside a subtask's bytes."""

    uid: OperatorUid
    state: str
    kind: StateKind
    offset: int
    length_bytes: int
    rows: int
    checksum: str
    key_group_rows: tuple[int, ...] = ()
    """For keyed state: prefix sums, `key_group_rows[g]:key_group_rows[g + 1]` are the rows of key group g."""


@wire
@dataclass(frozen=True, slots=True)
class StateHandle:
    """The state of one subtask: a file relative to the storage root, or the bytes themselves."""

    path: str | None
    inline: bytes | None
    size_bytes: int
    checksum: str
    sections: tuple[SectionRef, ...]


@wire
@dataclass(frozen=True, slots=True)
class DataFile:
    """A data file that a sink has written and that becomes visible when its checkpoint is committed."""

    path: str
    rows: int
    size_bytes: int
    checksum: str


@wire
@dataclass(frozen=True, slots=True)
class Committable:
    """What one sink subtask asks to be committed with a checkpoint: files of one table, in order.

    A subtask numbers the files of an attempt from 0. It reports all that it does not know to be committed, so a file
    may be reported twice; the numbers tell (the first of `files` has number `first_index`).
    """

    uid: OperatorUid
    subtask: SubtaskIndex
    table: str
    first_index: int
    files: tuple[DataFile, ...]


@wire
@dataclass(frozen=True, slots=True)
class SubtaskState:
    """One subtask's part of a checkpoint. `handle` is None for a stateless subtask.

    `finished`: its operators had finished before the cut, so they must not run again after a restore.
    `in_flight`: elements that an unaligned barrier has overtaken in the queues of the subtask: one section of kind LIST
    for each channel and direction (`in_flight_section` names them). None where there were none.
    """

    vertex: VertexId
    subtask: SubtaskIndex
    handle: StateHandle | None
    committables: tuple[Committable, ...] = ()
    finished: bool = False
    in_flight: StateHandle | None = None


@wire
@dataclass(frozen=True, slots=True)
class OperatorInfo:
    """An operator as the checkpoint knew it."""

    uid: OperatorUid
    name: str
    vertex: VertexId
    parallelism: int
    max_parallelism: int


@wire
@dataclass(frozen=True, slots=True)
class CheckpointMetadata:
    """The content of `chk-N/_metadata`; `void` marks a checkpoint that was given up and can never complete."""

    version: int
    job_id: JobId
    job_name: str
    checkpoint_id: CheckpointId
    attempt: AttemptNumber
    triggered_at_ms: int
    operators: tuple[OperatorInfo, ...]
    subtasks: tuple[SubtaskState, ...]
    void: bool = False
    final: bool = False
    """Whether every task had reached the end of its data."""
    restored_from: str | None = None
    """Pointer (`<job>/chk-N`) of the checkpoint that the job itself was started from."""
    kind: SnapshotKind = SnapshotKind.CHECKPOINT
    hooks: tuple[tuple[str, bytes], ...] = ()
    """What each master hook wanted to be kept with the checkpoint, by its identifier."""
    origin_root: str | None = None
    """Of a savepoint: the checkpoint root of the job that took it, where staged inputs and collected rows stay."""

    @property
    def size_bytes(self) -> int:
        """State bytes of all subtasks, inlined and in-flight ones included."""
        return sum(h.size_bytes for s in self.subtasks for h in (s.handle, s.in_flight) if h is not None)

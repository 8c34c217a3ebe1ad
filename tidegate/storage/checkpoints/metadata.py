"""`CheckpointMetadata`: what a checkpoint is made of: the types of `_metadata`, format version 5.

State belongs to operators (matched by uid), bytes belong to subtasks (a few files each, or inlined when small). A
`StateHandle` ties the two together: it says where the bytes are and which sections of them are which operator's; where
the rows of a section lie is said by the directory at the end of the file.

A file belongs to one checkpoint (`SubtaskState.handle`, `in_flight`), or several checkpoints share it (`layers` and
`native`): those lie under `shared/` and are deleted when the last of them is.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace

from tidegate.storage.checkpoints.state_meaning import StateMeaning
from tidegate.storage.codec import wire
from tidegate.storage.ids import AttemptNumber, CheckpointId, JobId, OperatorUid, SubtaskIndex, VertexId

METADATA_VERSION = 5


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

    @property
    def words(self) -> str:
        """What operators call it."""
        match self:
            case SnapshotKind.SUSPEND:
                return "stop-with-savepoint"
            case SnapshotKind.TERMINATE:
                return "stop-with-savepoint (drain)"
            case _:
                return str(self.value)


@wire
class SavepointFormat(enum.Enum):
    """What keyed state is in a savepoint. CANONICAL: sorted rows, the same bytes whatever the backend is. NATIVE: what
    the backend writes into checkpoints, as files of its own or in layers; quicker to take, and to restore with the same
    backend.
    """

    CANONICAL = "canonical"
    NATIVE = "native"


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
    """One state of one operator inside a subtask's bytes, from `offset` on."""

    uid: OperatorUid
    state: str
    kind: StateKind
    offset: int
    length_bytes: int
    rows: int
    removed: bool = False
    """Whether the rows are keys that are gone, and not rows that were put."""


@wire
@dataclass(frozen=True, slots=True)
class StateHandle:
    """State of one subtask: a file relative to the storage root, or the bytes themselves.

    `directory_bytes`: how long the directory at the end of the bytes is, seals included.
    """

    path: str | None
    inline: bytes | None
    size_bytes: int
    checksum: str
    sections: tuple[SectionRef, ...]
    directory_bytes: int = 0


@wire
@dataclass(frozen=True, slots=True)
class NativeFile:
    """A file of a backend that writes files of its own; `name` is that in the backend's folder."""

    name: str
    path: str
    size_bytes: int
    checksum: str
    key_groups: tuple[int, int] | None = None
    """Key groups for which it is needed: the first, and the one after the last. None: for any."""


@wire
@dataclass(frozen=True, slots=True)
class NativeState:
    """The keyed state of one operator in one subtask, as files of its backend.

    `key_groups`: first one of the subtask, and the one after its last; `description` is the backend's.
    """

    uid: OperatorUid
    backend: str
    key_groups: tuple[int, int]
    description: bytes
    files: tuple[NativeFile, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size_bytes for file in self.files)


@wire
@dataclass(frozen=True, slots=True)
class DataFile:
    """A data file that a sink has written and that becomes visible when its checkpoint is committed.

    What a sink of the user's has written has no path, but `committables`, which mean something to that sink.
    """

    path: str
    rows: int
    size_bytes: int
    checksum: str
    committables: tuple[bytes, ...] = ()


_OWN_SINK = "sink:"


def own_sink_place(uid: OperatorUid) -> str:
    """What stands for the URL of a table where a sink of the user's writes."""
    return f"{_OWN_SINK}{uid}"


def is_own_sink(place: str) -> bool:
    """Whether it is a sink of the user's, and no table."""
    return place.startswith(_OWN_SINK)


@wire
@dataclass(frozen=True, slots=True)
class Committable:
    """What one sink subtask asks to be committed with a checkpoint: files of one table, in order.

    A subtask numbers the files of an attempt from 0. It reports all that it does not know to be committed, so a file
    may be reported twice; the numbers tell (the first of `files` has number `first_index`). `table` is the URL of the
    table, or the place of a sink of the user's (`own_sink_place`).
    """

    uid: OperatorUid
    subtask: SubtaskIndex
    table: str
    first_index: int
    files: tuple[DataFile, ...]


@wire
@dataclass(frozen=True, slots=True)
class TableHead:
    """What a job knows to be in the log of an output table, whose URL is `url`.

    `seq` is the number of the newest entry, -1 if the job knows of none. `commit` is the newest checkpoint of the job
    that is committed there, None if none is.
    """

    url: str
    seq: int
    commit: CheckpointId | None = None


@wire
@dataclass(frozen=True, slots=True)
class OpenCommits:
    """Completed checkpoints with files for one table, of which the job did not know yet that they are committed."""

    url: str
    checkpoints: tuple[CheckpointId, ...]


@wire
@dataclass(frozen=True, slots=True)
class StoredSplit:
    """A split of a source as it is stored: a part of the input, with `rows` rows, or -1 if that is not known."""

    split_id: str
    payload: bytes
    rows: int = -1


@wire
@dataclass(frozen=True, slots=True)
class SubtaskState:
    """One subtask's part of a checkpoint. `handle` is None for a stateless subtask.

    `finished`: its operators had finished before the cut, so they must not run again after a restore.
    `in_flight`: elements that an unaligned barrier has overtaken in the queues of the subtask: one section of kind LIST
    for each channel and direction (`in_flight_section` names them), and one for the watermarks between its rows. None
    where there were none.
    `layers`: keyed state that is written incrementally, the base first, then what had changed from one to the next.
    `native`: keyed state of operators whose backend writes files of its own.
    `read_splits`: the splits that a finished subtask of a source had read to the end.
    """

    vertex: VertexId
    subtask: SubtaskIndex
    handle: StateHandle | None
    committables: tuple[Committable, ...] = ()
    finished: bool = False
    in_flight: StateHandle | None = None
    layers: tuple[StateHandle, ...] = ()
    native: tuple[NativeState, ...] = ()
    read_splits: tuple[StoredSplit, ...] = ()

    @property
    def handles(self) -> tuple[StateHandle, ...]:
        """Every handle."""
        return tuple(h for h in (self.handle, self.in_flight, *self.layers) if h is not None)

    @property
    def state_handles(self) -> tuple[StateHandle, ...]:
        """The handles with the state of operators, in the order in which they are to be applied."""
        return tuple(handle for _, handle in self.marked_handles)

    @property
    def marked_handles(self) -> tuple[tuple[int, StateHandle], ...]:
        """The same, each with the number of the layer with which its tables are marked."""
        return (*enumerate(self.layers), *(() if self.handle is None else ((0, self.handle),)))

    @property
    def native_files(self) -> tuple[NativeFile, ...]:
        """Every file of a backend that writes files of its own."""
        return tuple(file for state in self.native for file in state.files)

    @property
    def names(self) -> int:
        """How many files, states and splits it names: what its description costs, to an order of magnitude."""
        states = sum(1 + len(handle.sections) for handle in self.handles)
        files = len(self.native_files) + sum(len(c.files) for c in self.committables)
        return states + files + len(self.read_splits)

    @property
    def paths(self) -> tuple[str, ...]:
        """Every file, relative to the storage root."""
        return (*(h.path for h in self.handles if h.path is not None), *(file.path for file in self.native_files))

    @property
    def shared_paths(self) -> tuple[str, ...]:
        """Files that other checkpoints may refer to as well."""
        return (*(h.path for h in self.layers if h.path is not None), *(file.path for file in self.native_files))

    @property
    def size_bytes(self) -> int:
        """Bytes of all state, inlined and in-flight ones included."""
        return sum(h.size_bytes for h in self.handles) + sum(state.size_bytes for state in self.native)

    def moved(self, path: Callable[[str], str]) -> SubtaskState:
        """The same with another path of every file."""

        def of_handle(handle: StateHandle) -> StateHandle:
            return handle if handle.path is None else replace(handle, path=path(handle.path))

        def of_native(state: NativeState) -> NativeState:
            return replace(state, files=tuple(replace(file, path=path(file.path)) for file in state.files))

        return replace(
            self,
            handle=None if self.handle is None else of_handle(self.handle),
            in_flight=None if self.in_flight is None else of_handle(self.in_flight),
            layers=tuple(map(of_handle, self.layers)),
            native=tuple(map(of_native, self.native)),
        )


@wire
@dataclass(frozen=True, slots=True)
class OperatorInfo:
    """An operator as the checkpoint knew it."""

    uid: OperatorUid
    name: str
    vertex: VertexId
    parallelism: int
    max_parallelism: int
    keys: tuple[str, ...] = ()
    """The key columns of the rows that come to it; empty where there are none, and in checkpoints of older versions."""
    meaning: StateMeaning | None = None
    """What its state means. None for an operator without state, and for state that `SavepointWriter` made."""
    makes: str = ""
    """The rows that it emits, as far as the program tells: expressions by their structure, and columns."""
    inputs: tuple[OperatorUid, ...] = ()
    """The operators whose rows come to it."""
    reads: tuple[str, ...] | None = None
    """The columns of a source that the program uses, which alone are read. None for all, and for other operators."""


@wire
@dataclass(frozen=True, slots=True)
class SplitPool:
    """Splits of a source that no subtask has in its part of the checkpoint, in the order of the source.

    Whoever restores the checkpoint reads them from their first row. The others are in the state of the subtasks.
    """

    uid: OperatorUid
    splits: tuple[StoredSplit, ...]


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

    carried: tuple[NativeFile, ...] | None = None
    """Of a savepoint that was relocated: the files of its job's folder that it has with it, as if its own folder were
    the job's root. None: what was staged and collected stays with the job.
    """
    savepoint_format: SavepointFormat | None = None
    """None for a checkpoint, and for a savepoint that no job took, or one of an older version."""
    pools: tuple[SplitPool, ...] = ()
    """Of the sources whose splits the coordinator assigns. None in checkpoints of older versions: there, and of all
    other sources, the subtasks have every split."""
    table_heads: tuple[TableHead, ...] = ()
    """What the job knew to be in the log of each table. A log without it has lost entries."""
    open_commits: tuple[OpenCommits, ...] = ()
    """Earlier checkpoints whose commits were outstanding. A restore finds each in the log of the table, or commits it
    again from its own metadata; otherwise the log has lost it.
    """
    deleted: bool = False
    """Somebody has begun to delete it: it is not there any more, and this says what of it may be left."""

    def head_of(self, url: str) -> TableHead:
        """What the job knew to be in the log of a table."""
        return next((head for head in self.table_heads if head.url == url), TableHead(url, -1))

    def expected_commits(self, url: str) -> tuple[CheckpointId, ...]:
        """The checkpoints of the job that must be in the log of a table, or be committed again, ascending."""
        newest = self.head_of(url).commit
        waiting = next((commits.checkpoints for commits in self.open_commits if commits.url == url), ())
        return (*(() if newest is None else (newest,)), *waiting)

    def pool_of(self, uid: OperatorUid) -> tuple[StoredSplit, ...]:
        """The splits of a source that no subtask has."""
        return next((pool.splits for pool in self.pools if pool.uid == uid), ())

    @property
    def size_bytes(self) -> int:
        """State bytes of all subtasks, inlined and in-flight ones included."""
        return sum(subtask.size_bytes for subtask in self.subtasks)

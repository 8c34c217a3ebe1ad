"""`CheckpointMetadata`: the content of a checkpoint's `_metadata` file, and how the file is created and read.

State belongs to operators (matched by uid), bytes belong to subtasks (a few files each, or inlined when small). A
`StateHandle` connects the two: it names the bytes, and which sections of them belong to which operator. The directory
at the end of a state file locates the rows of a section.

A file belongs to one checkpoint (`SubtaskState.handle`, `in_flight`), or several checkpoints share it (`layers` and
`native`). Shared files are stored under `shared/`, and deleted with the last checkpoint that refers to them.

Creating `_metadata` completes a checkpoint. It is created exactly once, as one sealed file with the codec's bytes of
`CheckpointMetadata`. A reader checks that the file belongs to the checkpoint in whose folder it is.

`StateMeaning` describes what the state of an operator means. The names and types of stored columns do not distinguish a
sum from a maximum. Each stateful step therefore describes what makes its state: its functions, windows, keys, order,
time to live. A restored program is compared with that before anything runs
(`tidegate/actors/restore/meaning_checks.py`). Rules:

- A description consists of values that the program was given, and of expressions by their structure. It never depends
  on how a library displays them.
- Two descriptions are comparable only if their versions are equal.
- Functions of users have no comparable meaning: a description names the step that calls them, and the states of the
  step by name and type.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace

import pyarrow as pa

from tidegate.storage.checkpoints.layout import METADATA_NAME, CheckpointLayout, CheckpointPointer
from tidegate.storage.codec import decode, encode, wire
from tidegate.storage.errors import CodecError, CorruptionError, NotFoundError
from tidegate.storage.files.envelope import seal, unseal
from tidegate.storage.files.file_system_store import join_url
from tidegate.storage.files.store import Buffer, Store
from tidegate.storage.ids import AttemptNumber, CheckpointId, JobId, OperatorUid, SubtaskIndex, VertexId

METADATA_VERSION = 5


@wire
class SnapshotKind(enum.Enum):
    """The reason for a snapshot. SUSPEND and TERMINATE are the savepoints of `stop`, without and with drain."""

    CHECKPOINT = "checkpoint"
    SAVEPOINT = "savepoint"
    SUSPEND = "suspend"
    TERMINATE = "terminate"

    @property
    def is_savepoint(self) -> bool:
        """Returns True if the snapshot belongs to the user."""
        return self is not SnapshotKind.CHECKPOINT

    @property
    def stops(self) -> bool:
        """Returns True if the job ends after the snapshot."""
        return self in (SnapshotKind.SUSPEND, SnapshotKind.TERMINATE)

    @property
    def words(self) -> str:
        """Returns the name of this kind of snapshot in messages for users."""
        match self:
            case SnapshotKind.SUSPEND:
                return "stop-with-savepoint"
            case SnapshotKind.TERMINATE:
                return "stop-with-savepoint (drain)"
            case _:
                return str(self.value)


@wire
class SavepointFormat(enum.Enum):
    """The form of keyed state in a savepoint.

    CANONICAL: sorted rows, the same bytes for every backend. NATIVE: the form of checkpoints, as files of the backend
    or in layers, which is faster to take, and to restore with the same backend.
    """

    CANONICAL = "canonical"
    NATIVE = "native"


@wire
class StateKind(enum.Enum):
    """The way in which a state is split when the parallelism changes."""

    KEYED = "keyed"
    LIST = "list"
    UNION = "union"
    BROADCAST = "broadcast"


@wire
@dataclass(frozen=True, slots=True)
class SectionRef:
    """The position of one state of one operator within the bytes of a subtask, from `offset` on."""

    uid: OperatorUid
    state: str
    kind: StateKind
    offset: int
    length_bytes: int
    rows: int
    removed: bool = False
    """True if the rows are removed keys, and not rows that were put."""


@wire
@dataclass(frozen=True, slots=True)
class StateHandle:
    """The state of one subtask: the path of a file relative to the storage root, or the bytes themselves.

    `directory_bytes`: length of the directory at the end of the bytes, seals included.
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
    """A file of a backend with files of its own. `name` is its name in the backend's folder."""

    name: str
    path: str
    size_bytes: int
    checksum: str
    key_groups: tuple[int, int] | None = None
    """The range of key groups that need the file: the first, and the one after the last. None if all need it."""


@wire
@dataclass(frozen=True, slots=True)
class NativeState:
    """The keyed state of one operator in one subtask, as files of its backend.

    `key_groups`: the first one of the subtask, and the one after its last. `description` is made by the backend.
    """

    uid: OperatorUid
    backend: str
    key_groups: tuple[int, int]
    description: bytes
    files: tuple[NativeFile, ...]

    @property
    def size_bytes(self) -> int:
        """Returns the bytes of all files."""
        return sum(file.size_bytes for file in self.files)


@wire
@dataclass(frozen=True, slots=True)
class DataFile:
    """A data file that a sink has written and that becomes visible when its checkpoint is committed.

    Output of a user's sink has no path, but `committables`, which that sink interprets.
    """

    path: str
    rows: int
    size_bytes: int
    checksum: str
    committables: tuple[bytes, ...] = ()


_OWN_SINK = "sink:"


def own_sink_place(uid: OperatorUid) -> str:
    """Returns the text that stands for a user's sink where tables have a URL."""
    return f"{_OWN_SINK}{uid}"


def is_own_sink(place: str) -> bool:
    """Returns whether such a text stands for a user's sink, and not for a table."""
    return place.startswith(_OWN_SINK)


@wire
@dataclass(frozen=True, slots=True)
class Committable:
    """Files of one table, in order, that one sink subtask requests to commit with a checkpoint.

    A subtask numbers the files of an attempt from 0. It reports all files whose commit is not confirmed yet, so a file
    may be reported twice. The numbers identify it: the first of `files` has number `first_index`. `table` is the URL of
    the table, or the place of a user's sink (`own_sink_place`).
    """

    uid: OperatorUid
    subtask: SubtaskIndex
    table: str
    first_index: int
    files: tuple[DataFile, ...]


@wire
@dataclass(frozen=True, slots=True)
class PreparedPart:
    """Prepared rows of one bucket of a sink that commits in its tasks. The sink interprets `data`.

    `files` are paths of `CheckpointLayout.sink_file`.
    """

    bucket: int
    data: bytes
    files: tuple[str, ...] = ()


@wire
@dataclass(frozen=True, slots=True)
class PreparedRows:
    """Rows that one subtask of a sink has prepared for a checkpoint, and has not confirmed as committed.

    `job_id` and `checkpoint_id` are the token of the commit. The checkpoint is the one that stores these rows, or an
    earlier one that was aborted, or whose commit was not confirmed yet.
    """

    uid: OperatorUid
    job_id: JobId
    checkpoint_id: CheckpointId
    parts: tuple[PreparedPart, ...]


@wire
@dataclass(frozen=True, slots=True)
class TableHead:
    """How much of the log of the output table at `url` a job has seen.

    `seq` is the number of the newest entry, -1 if the job has seen none. `commit` is the newest checkpoint of the job
    that is committed there, None if none is.
    """

    url: str
    seq: int
    commit: CheckpointId | None = None


@wire
@dataclass(frozen=True, slots=True)
class OpenCommits:
    """Completed checkpoints with files for one table that were not yet confirmed as committed."""

    url: str
    checkpoints: tuple[CheckpointId, ...]


@wire
@dataclass(frozen=True, slots=True)
class StoredSplit:
    """A split of a source in a checkpoint: a part of the input with `rows` rows, or -1 if unknown."""

    split_id: str
    payload: bytes
    rows: int = -1


@wire
@dataclass(frozen=True, slots=True)
class SubtaskState:
    """One subtask's part of a checkpoint. `handle` is None for a stateless subtask.

    `finished`: its operators had finished before the snapshot, so they must not run again after a restore.
    `in_flight`: elements that an unaligned barrier has overtaken in the queues of the subtask: one section of kind LIST
    for each channel and direction (`in_flight_section` names them), and one for the watermarks between its rows; None
    without such elements.
    `layers`: keyed state that is written incrementally, the base first, then the changes from one to the next.
    `native`: keyed state of operators whose backend writes files of its own.
    `read_splits`: the splits that a finished subtask of a source had read to the end.
    `prepared`: rows of sinks that commit in their tasks, oldest first.
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
    prepared: tuple[PreparedRows, ...] = ()

    @property
    def handles(self) -> tuple[StateHandle, ...]:
        """Returns all handles: exclusive state, layers and in-flight data."""
        return tuple(h for h in (self.handle, self.in_flight, *self.layers) if h is not None)

    @property
    def state_handles(self) -> tuple[StateHandle, ...]:
        """Returns the handles with the state of operators, in the order in which a restore applies them."""
        return tuple(handle for _, handle in self.marked_handles)

    @property
    def marked_handles(self) -> tuple[tuple[int, StateHandle], ...]:
        """Returns the `state_handles`, each with the number of the layer that marks its tables."""
        return (*enumerate(self.layers), *(() if self.handle is None else ((0, self.handle),)))

    @property
    def native_files(self) -> tuple[NativeFile, ...]:
        """Returns the files of all backends that write files of their own."""
        return tuple(file for state in self.native for file in state.files)

    @property
    def names(self) -> int:
        """Returns the number of files, states and splits in the description. It measures roughly what the description
        costs.
        """
        states = sum(1 + len(handle.sections) for handle in self.handles)
        files = len(self.native_files) + sum(len(c.files) for c in self.committables)
        parts = sum(len(rows.parts) for rows in self.prepared)
        return states + files + parts + len(self.sink_paths) + len(self.read_splits)

    @property
    def paths(self) -> tuple[str, ...]:
        """Returns the paths of all files, relative to the storage root."""
        handles = (h.path for h in self.handles if h.path is not None)
        return (*handles, *(file.path for file in self.native_files), *self.sink_paths)

    @property
    def shared_paths(self) -> tuple[str, ...]:
        """Returns the paths of files to which other checkpoints may refer as well."""
        return (*(h.path for h in self.layers if h.path is not None), *(file.path for file in self.native_files))

    @property
    def sink_paths(self) -> tuple[str, ...]:
        """Returns the files of sinks that commit in their tasks. Other checkpoints may refer to them as well."""
        return tuple(path for rows in self.prepared for part in rows.parts for path in part.files)

    @property
    def size_bytes(self) -> int:
        """Returns the size in bytes of all state, including inlined state and in-flight data."""
        return sum(h.size_bytes for h in self.handles) + sum(state.size_bytes for state in self.native)

    def moved(self, path: Callable[[str], str]) -> SubtaskState:
        """Returns the same state with another path for every file."""

        def of_handle(handle: StateHandle) -> StateHandle:
            return handle if handle.path is None else replace(handle, path=path(handle.path))

        def of_native(state: NativeState) -> NativeState:
            return replace(state, files=tuple(replace(file, path=path(file.path)) for file in state.files))

        def of_part(part: PreparedPart) -> PreparedPart:
            return replace(part, files=tuple(map(path, part.files)))

        return replace(
            self,
            handle=None if self.handle is None else of_handle(self.handle),
            in_flight=None if self.in_flight is None else of_handle(self.in_flight),
            layers=tuple(map(of_handle, self.layers)),
            native=tuple(map(of_native, self.native)),
            prepared=tuple(replace(rows, parts=tuple(map(of_part, rows.parts))) for rows in self.prepared),
        )


@wire
@dataclass(frozen=True, slots=True)
class OperatorInfo:
    """An operator as described in a checkpoint."""

    uid: OperatorUid
    name: str
    vertex: VertexId
    parallelism: int
    max_parallelism: int
    keys: tuple[str, ...] = ()
    """The key columns of its input rows; empty without keys."""
    meaning: StateMeaning | None = None
    """The meaning of its state. None for an operator without state, and for state that `SavepointWriter` made."""
    makes: str = ""
    """Canonical description of the rows that it emits, as far as the program defines them: expressions and columns."""
    inputs: tuple[OperatorUid, ...] = ()
    """The operators that send it rows."""
    reads: tuple[str, ...] | None = None
    """For a source: the columns that are read because the program uses them. None for all columns, and for other
    operators.
    """


@wire
@dataclass(frozen=True, slots=True)
class SplitPool:
    """Splits of a source that no subtask has in its part of the checkpoint, in the order of the source.

    A restored job reads them from their first row. All other splits are in the state of the subtasks.
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
    """True if every task had reached the end of its data."""
    restored_from: str | None = None
    """Pointer (`<job>/chk-N`) of the checkpoint that the job itself was started from."""
    kind: SnapshotKind = SnapshotKind.CHECKPOINT
    hooks: tuple[tuple[str, bytes], ...] = ()
    """The data of each master hook, by the identifier of the hook."""
    origin_root: str | None = None
    """For a savepoint: the checkpoint root of the job that took it, where staged inputs and collected rows stay."""

    carried: tuple[NativeFile, ...] | None = None
    """For a relocated savepoint: copies of files from the folders of earlier jobs, with paths as in a job's root.

    None: staged inputs and collected rows stay with the job.
    """
    savepoint_format: SavepointFormat | None = None
    """None for a checkpoint, and for a savepoint that was not taken by a job."""
    pools: tuple[SplitPool, ...] = ()
    """Pools of sources with splits that the coordinator assigns. The splits of other sources are in the subtasks."""
    table_heads: tuple[TableHead, ...] = ()
    """How much of the log of each table the job had seen. A log that ends earlier has lost entries."""
    open_commits: tuple[OpenCommits, ...] = ()
    """Earlier checkpoints whose commits were outstanding. A restore finds each in the log of the table, or commits it
    again from its own metadata; otherwise the log has lost it.
    """
    deleted: bool = False
    """True if its deletion has begun. It can no longer be used, and the metadata names files that may remain."""

    def head_of(self, url: str) -> TableHead:
        """Returns how much of the log of a table the job had seen."""
        return next((head for head in self.table_heads if head.url == url), TableHead(url, -1))

    def expected_commits(self, url: str) -> tuple[CheckpointId, ...]:
        """Returns the job's checkpoints that the log of a table must have, or that a restore commits again,
        ascending.
        """
        newest = self.head_of(url).commit
        waiting = next((commits.checkpoints for commits in self.open_commits if commits.url == url), ())
        return (*(() if newest is None else (newest,)), *waiting)

    def pool_of(self, uid: OperatorUid) -> tuple[StoredSplit, ...]:
        """Returns the splits of a source that were not assigned to a subtask."""
        return next((pool.splits for pool in self.pools if pool.uid == uid), ())

    @property
    def size_bytes(self) -> int:
        """Returns the size in bytes of the state of all subtasks, including inlined state and in-flight data."""
        return sum(subtask.size_bytes for subtask in self.subtasks)


MAGIC = b"TGCKMETA"


def encode_metadata(metadata: CheckpointMetadata) -> bytes:
    """Returns the bytes of a `_metadata` file."""
    return seal(MAGIC, metadata.version, encode(metadata))


def decode_metadata(data: Buffer, where: str = "_metadata") -> CheckpointMetadata:
    """Returns the inverse of `encode_metadata`. Raises CorruptionError for damage, CodecError for another version."""
    metadata = decode(unseal(MAGIC, METADATA_VERSION, data, where, version_min=METADATA_VERSION))
    if not isinstance(metadata, CheckpointMetadata):
        raise CodecError(
            f"{where} holds a {type(metadata).__name__}, not the metadata of a checkpoint; choose another checkpoint"
        )
    return metadata


def create_metadata(store: Store, metadata: CheckpointMetadata) -> None:
    """Creates `_metadata`, which completes or voids a checkpoint. Raises AlreadyExistsError if it was completed or
    voided before.
    """
    path = CheckpointLayout(metadata.job_id).metadata(metadata.checkpoint_id)
    store.create(path, encode_metadata(metadata))


def read_metadata(
    store: Store, job_id: JobId, checkpoint_id: CheckpointId, *, savepoint: bool = False, deleted: bool = False
) -> CheckpointMetadata:
    """Reads and checks `_metadata`. For a `savepoint` the file is at the root of its store.

    Raises NotFoundError if there is none, or if its deletion has begun, unless `deleted` accepts that. Raises
    CorruptionError for damage.
    """
    path = METADATA_NAME if savepoint else CheckpointLayout(job_id).metadata(checkpoint_id)
    where = join_url(store.url, path)
    metadata = decode_metadata(store.read(path), where)
    if (metadata.job_id, metadata.checkpoint_id) != (job_id, checkpoint_id):
        raise CorruptionError(
            f"{where} is the metadata of checkpoint {metadata.checkpoint_id} of {metadata.job_id}: it was copied here"
            "; restore it at its own path, or copy savepoints with `tidegate checkpoints relocate`"
        )
    if metadata.deleted and not deleted:
        raise NotFoundError(f"{where}: the deletion of this checkpoint was interrupted; delete it again")
    return metadata


def read_pointed(store: Store, at: CheckpointPointer) -> CheckpointMetadata:
    """Returns the metadata that a pointer names. `store` is opened at its root."""
    return read_metadata(store, at.job_id, at.checkpoint_id, savepoint=at.savepoint)


MEANING_VERSION = 1


@wire
@dataclass(frozen=True, slots=True)
class MeaningPart:
    """One fact: its role (`window`, `keys`, `aggregate`), the name that the program gave it, and its canonical text.

    `name` is empty where a role has one part only. Aggregates are named by their output columns.
    """

    role: str
    name: str
    text: str

    @property
    def label(self) -> str:
        """Text of the fact for errors."""
        return f"{self.role} {self.name}={self.text}" if self.name else f"{self.role} {self.text}"


@wire
@dataclass(frozen=True, slots=True)
class MeaningColumns:
    """The types of the stored columns that belong to one part, as a serialised Arrow schema.

    `role` and `name` identify the part. For stored input rows they are `rows` and a side.
    """

    role: str
    name: str
    schema: bytes

    @staticmethod
    def of(role: str, name: str, schema: pa.Schema) -> MeaningColumns:
        """Returns the columns of an Arrow schema, without its metadata."""
        plain = pa.schema([field.remove_metadata() for field in schema])
        return MeaningColumns(role, name, plain.serialize().to_pybytes())

    @property
    def arrow_schema(self) -> pa.Schema:
        """Returns the columns as an Arrow schema."""
        return pa.ipc.read_schema(pa.py_buffer(self.schema))


@wire
@dataclass(frozen=True, slots=True)
class StateMeaning:
    """The meaning of one operator's state.

    `kind` is the step that makes the state, such as `window aggregate`. `evolves` are roles that may gain and lose
    parts between two programs. `columns` is empty if the columns are only known when the job runs.
    """

    kind: str
    parts: tuple[MeaningPart, ...] = ()
    columns: tuple[MeaningColumns, ...] = ()
    evolves: tuple[str, ...] = ()
    version: int = MEANING_VERSION

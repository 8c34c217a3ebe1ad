"""`CheckpointMetadata`: the content of a checkpoint's `_metadata` file, and how the file is created and read.

State belongs to operators (matched by uid). Its bytes are stored per subtask, in a few files or inlined in the metadata
when small. A `StateHandle` connects the two: it names the bytes, and which sections of them belong to which operator.
The directory at the end of a state file locates the rows of a section.

A file belongs to one checkpoint (`SubtaskState.handle`, `in_flight`), or several checkpoints share it (`layers` and
`native`). Shared files are stored under `shared/`, and deleted with the last checkpoint that refers to them.

Creating `_metadata` completes a checkpoint. It is created exactly once, as one sealed file with the codec's bytes of
`CheckpointMetadata`. A reader checks that the file belongs to the checkpoint in whose folder it is.

`StateMeaning` describes what the state of an operator means. The names and types of stored columns do not distinguish a
sum from a maximum. Each stateful step therefore describes what makes its state: its functions, windows, keys, order,
time to live. A restore compares the descriptions of the program with the stored ones before anything runs
(`tidegate/actors/restore/meaning_checks.py`). Rules:

- A description consists of argument values of the program, and of the structure of expressions. It never depends on how
  a library prints an expression.
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
        """Returns True for all snapshots that a user requested (savepoints), which tidegate never deletes by itself."""
        return self is not SnapshotKind.CHECKPOINT

    @property
    def stops(self) -> bool:
        """Returns True if the job ends after a snapshot of this kind."""
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
    """The file format of keyed state in a savepoint.

    CANONICAL: sorted rows, the same bytes for every backend. NATIVE: the format of checkpoints (files of the state
    backend, or layers), which is faster to write, and to restore with the same backend.
    """

    CANONICAL = "canonical"
    NATIVE = "native"


@wire
class StateKind(enum.Enum):
    """The way in which a state is redistributed over subtasks when the parallelism changes."""

    KEYED = "keyed"
    LIST = "list"
    UNION = "union"
    BROADCAST = "broadcast"


@wire
@dataclass(frozen=True, slots=True)
class SectionRef:
    """Locates one state of one operator within the bytes of a subtask: `length_bytes` from `offset` on."""

    uid: OperatorUid
    state: str
    kind: StateKind
    offset: int
    length_bytes: int
    rows: int
    removed: bool = False
    """True if the rows are deleted keys, and not inserted or updated rows."""


@wire
@dataclass(frozen=True, slots=True)
class StateHandle:
    """The state of one subtask: the path of a file relative to the storage root, or the bytes themselves.

    `directory_bytes`: length of the directory (the index of the sections) at the end of the bytes, headers included.
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
    """A file of a state backend with its own file format (RocksDB).

    `name` is the file's name in the backend's local folder.
    """

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

    `key_groups`: the first key group of the subtask, and the one after its last. `description` is opaque data of the
    backend.
    """

    uid: OperatorUid
    backend: str
    key_groups: tuple[int, int]
    description: bytes
    files: tuple[NativeFile, ...]

    @property
    def size_bytes(self) -> int:
        """Returns the total size of all files, in bytes."""
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
    """Returns the text that identifies a user's sink where an output table would have a URL."""
    return f"{_OWN_SINK}{uid}"


def is_own_sink(place: str) -> bool:
    """Returns whether `place` identifies a user's sink (`own_sink_place`), and not a table by its URL."""
    return place.startswith(_OWN_SINK)


@wire
@dataclass(frozen=True, slots=True)
class Committable:
    """The files of one table, in order, that one sink subtask reports for the commit of a checkpoint.

    A subtask numbers the files of an attempt from 0. It reports all files whose commit is not confirmed yet, so a file
    may be reported twice. The numbers identify it: the first of `files` has number `first_index`. `table` is the URL of
    the table, or the text of `own_sink_place` for a user's sink.
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
    """The position up to which a job has read the commit log of the output table at `url`.

    `seq` is the number of the newest entry, -1 if the job has seen none. `commit` is the newest checkpoint of the job
    that is committed to the table, or None.
    """

    url: str
    seq: int
    commit: CheckpointId | None = None


@wire
@dataclass(frozen=True, slots=True)
class OpenCommits:
    """Completed checkpoints whose files for the table at `url` are not yet confirmed as committed."""

    url: str
    checkpoints: tuple[CheckpointId, ...]


@wire
@dataclass(frozen=True, slots=True)
class StoredSplit:
    """A split of a source as stored in a checkpoint. `rows` is the number of rows in the split, or -1 if unknown."""

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
        """Returns all state handles of the subtask: state of this checkpoint alone, layers of keyed state, and
        in-flight data.
        """
        return tuple(h for h in (self.handle, self.in_flight, *self.layers) if h is not None)

    @property
    def state_handles(self) -> tuple[StateHandle, ...]:
        """Returns the handles with the state of operators, in the order in which a restore applies them."""
        return tuple(handle for _, handle in self.marked_handles)

    @property
    def marked_handles(self) -> tuple[tuple[int, StateHandle], ...]:
        """Returns pairs of layer number and handle for the `state_handles`. State that belongs to this checkpoint alone
        has layer number 0.
        """
        return (*enumerate(self.layers), *(() if self.handle is None else ((0, self.handle),)))

    @property
    def native_files(self) -> tuple[NativeFile, ...]:
        """Returns the files of all state backends with their own file format."""
        return tuple(file for state in self.native for file in state.files)

    @property
    def names(self) -> int:
        """Returns the number of files, states and splits that this object lists: a rough measure of its memory."""
        states = sum(1 + len(handle.sections) for handle in self.handles)
        files = len(self.native_files) + sum(len(c.files) for c in self.committables)
        parts = sum(len(rows.parts) for rows in self.prepared)
        return states + files + parts + len(self.sink_paths) + len(self.read_splits)

    @property
    def paths(self) -> tuple[str, ...]:
        """Returns the paths of all files of the subtask, relative to the storage root."""
        handles = (h.path for h in self.handles if h.path is not None)
        return (*handles, *(file.path for file in self.native_files), *self.sink_paths)

    @property
    def shared_paths(self) -> tuple[str, ...]:
        """Returns the paths of the subtask's files to which other checkpoints may refer as well."""
        return (*(h.path for h in self.layers if h.path is not None), *(file.path for file in self.native_files))

    @property
    def sink_paths(self) -> tuple[str, ...]:
        """Returns the paths of the prepared rows of sinks that commit in their tasks.

        Other checkpoints may refer to them.
        """
        return tuple(path for rows in self.prepared for part in rows.parts for path in part.files)

    @property
    def size_bytes(self) -> int:
        """Returns the size in bytes of all state of the subtask, including inlined state and in-flight data."""
        return sum(h.size_bytes for h in self.handles) + sum(state.size_bytes for state in self.native)

    def moved(self, path: Callable[[str], str]) -> SubtaskState:
        """Returns a copy of the state in which each file path is replaced by the result of the function `path`."""

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
    """Describes one operator in a checkpoint."""

    uid: OperatorUid
    name: str
    vertex: VertexId
    parallelism: int
    max_parallelism: int
    keys: tuple[str, ...] = ()
    """The key columns of the operator's input rows. Empty if the input is not keyed."""
    meaning: StateMeaning | None = None
    """The meaning of the operator's state. None for a stateless operator, and for state that `SavepointWriter` made."""
    makes: str = ""
    """Canonical description of the operator's output rows, as far as the program defines them: expressions and columns.
    """
    inputs: tuple[OperatorUid, ...] = ()
    """The uids of the operators whose output this operator reads."""
    reads: tuple[str, ...] | None = None
    """For a source: the columns that are read because the program uses them.

    None for all columns, and for operators that are not sources.
    """


@wire
@dataclass(frozen=True, slots=True)
class SplitPool:
    """The splits of a source that were not assigned to a subtask when the checkpoint was taken, in the order of the
    source.

    A restored job reads them from their first row. All other splits are in the state of the subtasks.
    """

    uid: OperatorUid
    splits: tuple[StoredSplit, ...]


@wire
@dataclass(frozen=True, slots=True)
class CheckpointMetadata:
    """The content of `chk-N/_metadata`; `void` marks a checkpoint that was aborted and can never complete."""

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
    """True if every task had reached the end of its input."""
    restored_from: str | None = None
    """Pointer (`<job>/chk-N`) of the checkpoint from which the job was started, or None."""
    kind: SnapshotKind = SnapshotKind.CHECKPOINT
    hooks: tuple[tuple[str, bytes], ...] = ()
    """The data of each master hook, by the identifier of the hook."""
    origin_root: str | None = None
    """For a savepoint: the checkpoint root of the job that took it, where staged inputs and collected rows stay."""

    carried: tuple[NativeFile, ...] | None = None
    """For a relocated savepoint: copies of files from the folders of earlier jobs, with paths as in a job's root.

    None if staged inputs and collected rows stay with the job.
    """
    savepoint_format: SavepointFormat | None = None
    """None for a checkpoint, and for a savepoint that was not taken by a job."""
    pools: tuple[SplitPool, ...] = ()
    """The unassigned splits of sources whose splits the coordinator assigns.

    Splits of other sources are in the subtasks.
    """
    table_heads: tuple[TableHead, ...] = ()
    """The position up to which the job had read the log of each table. A log that ends earlier has lost entries."""
    open_commits: tuple[OpenCommits, ...] = ()
    """Earlier checkpoints whose commits to tables were not confirmed.

    A restore finds each in the log of the table, or commits it again from its own metadata. Otherwise the log has lost
    the commit.
    """
    deleted: bool = False
    """True once the deletion of the checkpoint has begun.

    It cannot be restored any more, and the metadata names files that may remain.
    """

    def head_of(self, url: str) -> TableHead:
        """Returns the position up to which the job had read the log of the table at `url`.

        `seq` is -1 if it had read nothing.
        """
        return next((head for head in self.table_heads if head.url == url), TableHead(url, -1))

    def expected_commits(self, url: str) -> tuple[CheckpointId, ...]:
        """Returns the ids of the job's checkpoints, ascending, that the log of the table at `url` must have as commits.

        A restore commits missing ones again.
        """
        newest = self.head_of(url).commit
        waiting = next((commits.checkpoints for commits in self.open_commits if commits.url == url), ())
        return (*(() if newest is None else (newest,)), *waiting)

    def pool_of(self, uid: OperatorUid) -> tuple[StoredSplit, ...]:
        """Returns the splits of the source `uid` that were not assigned to a subtask."""
        return next((pool.splits for pool in self.pools if pool.uid == uid), ())

    @property
    def size_bytes(self) -> int:
        """Returns the size in bytes of the state of all subtasks, including inlined state and in-flight data."""
        return sum(subtask.size_bytes for subtask in self.subtasks)


MAGIC = b"TGCKMETA"


def encode_metadata(metadata: CheckpointMetadata) -> bytes:
    """Returns the content of a `_metadata` file."""
    return seal(MAGIC, metadata.version, encode(metadata))


def decode_metadata(data: Buffer, where: str = "_metadata") -> CheckpointMetadata:
    """Returns the metadata in the content of a `_metadata` file. `where` names the file in errors.

    Raises CorruptionError for damage, CodecError for another version.
    """
    metadata = decode(unseal(MAGIC, METADATA_VERSION, data, where))
    if not isinstance(metadata, CheckpointMetadata):
        raise CodecError(
            f"{where} holds a {type(metadata).__name__}, not the metadata of a checkpoint; choose another checkpoint"
        )
    return metadata


def create_metadata(store: Store, metadata: CheckpointMetadata) -> None:
    """Creates the `_metadata` file, which completes a checkpoint, or marks it as void.

    Raises AlreadyExistsError if the checkpoint was completed or marked as void before.
    """
    path = CheckpointLayout(metadata.job_id).metadata(metadata.checkpoint_id)
    store.create(path, encode_metadata(metadata))


def read_metadata(
    store: Store, job_id: JobId, checkpoint_id: CheckpointId, *, savepoint: bool = False, deleted: bool = False
) -> CheckpointMetadata:
    """Reads and checks `_metadata`. For a `savepoint` the file is at the root of its store.

    Raises NotFoundError if there is no such file, or if the deletion of the checkpoint has begun (unless `deleted` is
    True). Raises CorruptionError for damage.
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
    """Returns the metadata of the checkpoint or savepoint `at`. `store` must be opened at the root of `at`."""
    return read_metadata(store, at.job_id, at.checkpoint_id, savepoint=at.savepoint)


MEANING_VERSION = 1


@wire
@dataclass(frozen=True, slots=True)
class MeaningPart:
    """One fact about the meaning of a state: its role (`window`, `keys`, `aggregate`), the name that the program gave
    it, and its canonical text.

    `name` is empty where a role has one part only. Aggregates are named by their output columns.
    """

    role: str
    name: str
    text: str

    @property
    def label(self) -> str:
        """Returns the text of the fact, for errors."""
        return f"{self.role} {self.name}={self.text}" if self.name else f"{self.role} {self.text}"


@wire
@dataclass(frozen=True, slots=True)
class MeaningColumns:
    """The types of the stored columns that belong to one part, as a serialised Arrow schema.

    `role` and `name` identify the part. For stored input rows, `role` is `rows` and `name` is the side of the join.
    """

    role: str
    name: str
    schema: bytes

    @staticmethod
    def of(role: str, name: str, schema: pa.Schema) -> MeaningColumns:
        """Builds the columns from an Arrow schema, without the metadata of its fields."""
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

    `kind` is the step that makes the state, such as `window aggregate`. `evolves` lists the roles that may gain and
    lose parts between two versions of a program. `columns` is empty if the columns are only known when the job runs.
    """

    kind: str
    parts: tuple[MeaningPart, ...] = ()
    columns: tuple[MeaningColumns, ...] = ()
    evolves: tuple[str, ...] = ()
    version: int = MEANING_VERSION

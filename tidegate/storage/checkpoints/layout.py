"""The layout of checkpoint storage: the only module that spells paths below the checkpoint root.

Paths are relative to the root, so a root can be moved. Names made of user text are escaped reversibly, so that any uid
is a valid file name and can be read back from a listing.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote, unquote

from tidegate.storage.errors import ConfigurationError
from tidegate.storage.files.file_system_store import HOSTED_SCHEMES, join_url
from tidegate.storage.ids import AttemptNumber, CheckpointId, JobId, OperatorUid, SubtaskIndex, VertexId

METADATA_NAME = "_metadata"
CHANGELOG_NAME = "changelog"
SINKS_NAME = "sinks"
_CHECKPOINT_PREFIX = "chk-"
_SAVEPOINT_PREFIX = "savepoint-"
_CHANNELS_SUFFIX = "-channels"
_BASE, _SEGMENT = "base", "segment"
_ROWS = "rows"
NATIVE_MARK = "="
"""A separator in the names of folders with native files of a state backend (RocksDB).

Names of other files in the same folder never contain it, because `escape` encodes it.
"""


@dataclass(frozen=True, slots=True)
class CheckpointLayout:
    """Paths of one job, relative to the checkpoint root.

    Raises ConfigurationError for an id that cannot be the name of a folder.
    """

    job_id: JobId

    def __post_init__(self) -> None:
        if self.job_id in ("", ".", "..") or "/" in self.job_id:
            raise ConfigurationError(
                f"{self.job_id!r} cannot be a job id, because it is not usable as a folder name: give letters, "
                "digits, '-' and '_'"
            )

    def job_dir(self) -> str:
        """Returns the folder that contains all files of the job."""
        return self.job_id

    def keep_mark(self) -> str:
        """Returns the path of a marker file.

        While the file exists, the checkpoints of a job with temporary storage are kept.
        """
        return f"{self.job_id}/keep"

    def savepoint_mark(self) -> str:
        """Returns the path of a marker file which shows that a savepoint refers to task-owned files of a job with
        temporary storage.
        """
        return f"{self.job_id}/has-savepoint"

    def checkpoint_dir(self, checkpoint_id: CheckpointId) -> str:
        """Returns the folder of one checkpoint."""
        return f"{self.job_id}/{checkpoint_name(checkpoint_id)}"

    def metadata(self, checkpoint_id: CheckpointId) -> str:
        """Returns the path of the metadata file. A checkpoint is complete once this file exists."""
        return f"{self.checkpoint_dir(checkpoint_id)}/{METADATA_NAME}"

    def state_file(self, checkpoint_id: CheckpointId, vertex: VertexId, subtask: SubtaskIndex) -> str:
        """Returns the path of the file with the state of one subtask that belongs to this checkpoint alone."""
        return f"{self.checkpoint_dir(checkpoint_id)}/{escape(vertex)}-{subtask}"

    def channels_file(self, checkpoint_id: CheckpointId, vertex: VertexId, subtask: SubtaskIndex) -> str:
        """Returns the path of the file with one subtask's in-flight elements (unaligned checkpoints).

        The name does not end in a digit, so it is never the name of a `state_file`.
        """
        return f"{self.state_file(checkpoint_id, vertex, subtask)}{_CHANNELS_SUFFIX}"

    def shared_dir(self) -> str:
        """Returns the folder of files that several checkpoints may use."""
        return f"{self.job_id}/shared"

    def shared_checkpoint_dir(self, checkpoint_id: CheckpointId) -> str:
        """Returns the folder of the shared files that were written for one checkpoint.

        Later checkpoints may refer to the files.
        """
        return f"{self.shared_dir()}/{checkpoint_name(checkpoint_id)}"

    def layer_file(self, checkpoint_id: CheckpointId, vertex: VertexId, subtask: SubtaskIndex) -> str:
        """Returns the path of the file with the increment (layer) of keyed state that one subtask wrote for a
        checkpoint.
        """
        return f"{self.shared_checkpoint_dir(checkpoint_id)}/{escape(vertex)}-{subtask}"

    def native_dir(self, checkpoint_id: CheckpointId, vertex: VertexId, subtask: SubtaskIndex, uid: OperatorUid) -> str:
        """Returns the folder of the files that the state backend of one operator wrote for a checkpoint.

        The name of the folder contains `NATIVE_MARK`, so it is never the name of a `layer_file`.
        """
        return f"{self.layer_file(checkpoint_id, vertex, subtask)}{NATIVE_MARK}{escape(uid)}"

    def changelog_dir(self) -> str:
        """Returns the folder of the changelogs of all tasks."""
        return f"{self.shared_dir()}/{CHANGELOG_NAME}"

    def changelog_file(
        self, vertex: VertexId, subtask: SubtaskIndex, attempt: AttemptNumber, number: int, whole: bool
    ) -> str:
        """Returns the path of changelog file `number` of one subtask in one attempt: a full base if `whole`, else a
        segment.
        """
        kind = _BASE if whole else _SEGMENT
        return f"{self.changelog_dir()}/{escape(vertex)}-{subtask}.{attempt:06d}-{number:08d}.{kind}"

    def sinks_dir(self) -> str:
        """Returns the folder of the rows that sinks have prepared, if their tasks (and not the coordinator) commit
        them.
        """
        return f"{self.shared_dir()}/{SINKS_NAME}"

    def sink_file(self, uid: OperatorUid, subtask: SubtaskIndex, attempt: AttemptNumber, number: int) -> str:
        """Returns the path of file `number` with prepared rows of one sink subtask in one attempt."""
        return f"{self.sinks_dir()}/{escape(uid)}-{subtask}.{attempt:06d}-{number:08d}.{_ROWS}"

    def path_in_savepoint(self, checkpoint_id: CheckpointId, path: str) -> str:
        """Returns the path at which a savepoint stores a file of its checkpoint, relative to the savepoint's folder.

        The name of a shared file's folder is kept, so two files never get the same path.
        """
        return path.removeprefix(f"{self.checkpoint_dir(checkpoint_id)}/").removeprefix(f"{self.job_dir()}/")

    def taskowned_dir(self) -> str:
        """Returns the folder of files that tasks own and that no checkpoint deletes."""
        return f"{self.job_id}/taskowned"

    def events_dir(self) -> str:
        """Returns the folder of the event log."""
        return f"{self.job_id}/events"

    def lease(self) -> str:
        """Returns the path of the lease file, which the job renews while it runs."""
        return f"{self.job_id}/lease"


def checkpoint_name(checkpoint_id: CheckpointId) -> str:
    """Returns the folder name of a checkpoint: `chk-17`."""
    return f"{_CHECKPOINT_PREFIX}{checkpoint_id}"


def parse_checkpoint_name(name: str) -> CheckpointId | None:
    """Returns the checkpoint id in a folder name `chk-17`, or None for any other name."""
    digits = name.removeprefix(_CHECKPOINT_PREFIX)
    return None if digits == name else _parse_checkpoint_id(digits)


def parse_state_file_name(name: str) -> tuple[VertexId, SubtaskIndex] | None:
    """Returns the vertex and the subtask in the file name of a `state_file`, or None for any other name."""
    vertex, separator, digits = name.rpartition("-")
    if not separator or not (digits.isascii() and digits.isdigit()):
        return None
    return VertexId(unescape(vertex)), SubtaskIndex(int(digits))


def parse_channels_file_name(name: str) -> tuple[VertexId, SubtaskIndex] | None:
    """Returns the vertex and the subtask in the file name of a `channels_file`, or None for any other name."""
    state_file_name = name.removesuffix(_CHANNELS_SUFFIX)
    return None if state_file_name == name else parse_state_file_name(state_file_name)


def parse_changelog_file_name(name: str) -> tuple[VertexId, SubtaskIndex, AttemptNumber] | None:
    """Returns the vertex, the subtask and the attempt in the file name of a `changelog_file`, or None for any other
    name.
    """
    task, numbers, kind = ("", "", *name.rsplit(".", 2))[-3:]
    attempt, _, number = numbers.partition("-")
    found = parse_state_file_name(task)
    numbered = all(digits.isascii() and digits.isdigit() for digits in (attempt, number))
    if found is None or not numbered or kind not in (_BASE, _SEGMENT):
        return None
    return *found, AttemptNumber(int(attempt))


def parse_sink_file_name(name: str) -> AttemptNumber | None:
    """Returns the attempt number in the file name of a `sink_file`, or None for any other name."""
    task, numbers, kind = ("", "", *name.rsplit(".", 2))[-3:]
    attempt, _, number = numbers.partition("-")
    numbered = all(digits.isascii() and digits.isdigit() for digits in (attempt, number))
    return AttemptNumber(int(attempt)) if task and numbered and kind == _ROWS else None


def savepoint_name(job_id: JobId, checkpoint_id: CheckpointId) -> str:
    """Returns the folder name of a savepoint: `savepoint-<job>-17`. Raises ConfigurationError for an invalid job id."""
    return f"{_SAVEPOINT_PREFIX}{CheckpointLayout(job_id).job_dir()}-{checkpoint_id}"


def parse_savepoint_name(name: str) -> tuple[JobId, CheckpointId] | None:
    """Returns the job and the checkpoint id in a folder name `savepoint-<job>-17`, or None for any other name."""
    rest = name.removeprefix(_SAVEPOINT_PREFIX)
    job, separator, digits = rest.rpartition("-")
    checkpoint_id = _parse_checkpoint_id(digits)
    if rest == name or not separator or job in ("", ".", "..") or checkpoint_id is None:
        return None
    return JobId(job), checkpoint_id


@dataclass(frozen=True, slots=True)
class CheckpointPointer:
    """Points to a checkpoint or a savepoint. The paths in its metadata are relative to `root`.

    All checkpoints of a job share a root. For a savepoint, `root` is the savepoint's own folder, so that the folder can
    be moved.
    """

    root: str
    job_id: JobId
    checkpoint_id: CheckpointId
    savepoint: bool = False

    @property
    def metadata(self) -> str:
        """Returns the path of `_metadata` below `root`."""
        return METADATA_NAME if self.savepoint else CheckpointLayout(self.job_id).metadata(self.checkpoint_id)

    def __str__(self) -> str:
        """Returns the URL of the checkpoint's or savepoint's folder, which `parse_pointer` accepts."""
        if self.savepoint:
            return self.root
        return join_url(self.root, CheckpointLayout(self.job_id).checkpoint_dir(self.checkpoint_id))


def parse_pointer(path: str) -> CheckpointPointer:
    """Parses a path `<root>/<job>/chk-17` or `<folder>/savepoint-<job>-17` into root URL, job and checkpoint id.

    The path may end with `/` or `/_metadata`. Raises ConfigurationError for any other path.
    """
    advice = (
        "a checkpoint is given as <root>/<job>/chk-<number>, e.g. s3://bucket/checkpoints/my-job-1a2b3c4d/chk-17, "
        "a savepoint as <folder>/savepoint-<job>-<number>"
    )
    trimmed = path.rstrip("/").removesuffix(f"/{METADATA_NAME}").rstrip("/")
    scheme, separator, rest = trimmed.partition("://")
    if not separator:
        scheme, rest = "", trimmed
    folder, _, name = rest.rpartition("/")
    savepoint = parse_savepoint_name(name)
    if savepoint is not None:
        return CheckpointPointer(trimmed, *savepoint, savepoint=True)
    checkpoint_id = parse_checkpoint_name(name)
    if checkpoint_id is None:
        raise ConfigurationError(f"{path!r} names no checkpoint: {name!r} is not chk-<number>; {advice}")
    folder = folder.rstrip("/")
    root, slash, job = folder.rpartition("/")
    bucket_missing = scheme in HOSTED_SCHEMES and not root
    if job in ("", ".", "..") or bucket_missing:
        raise ConfigurationError(f"{path!r} names no job before {name!r}; {advice}")
    if not separator and not root:
        root = "/" if slash else "."
    return CheckpointPointer(f"{scheme}{separator}{root}", JobId(job), checkpoint_id)


def escape(text: str) -> str:
    """Returns `text` percent-encoded, so that it is a valid file name that is not hidden."""
    escaped = quote(text, safe="", errors="surrogatepass")
    return f"%2E{escaped[1:]}" if escaped.startswith(".") else escaped


def unescape(name: str) -> str:
    """Returns the text that `escape` has encoded as `name`."""
    return unquote(name, errors="surrogatepass")


def _parse_checkpoint_id(digits: str) -> CheckpointId | None:
    if not (digits.isascii() and digits.isdigit()) or digits.startswith("0"):
        return None
    return CheckpointId(int(digits))

"""Where everything of a job lies: the one place that spells a path below the checkpoint root.

Paths are relative to the root, so a root can be moved. Names made of user text are escaped reversibly, so
that any uid is a valid file name and can be read back from a listing.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote, unquote

from tidegate.storage.errors import ConfigurationError
from tidegate.storage.filesystem import join_url
from tidegate.storage.ids import CheckpointId, JobId, SubtaskIndex, VertexId

METADATA_NAME = "_metadata"
_CHECKPOINT_PREFIX = "chk-"


@dataclass(frozen=True, slots=True)
class CheckpointLayout:
    """Paths of one job, relative to the checkpoint root.

    Raises ConfigurationError for an id that is no folder name.
    """

    job_id: JobId

    def __post_init__(self) -> None:
        if self.job_id in ("", ".", "..") or "/" in self.job_id:
            raise ConfigurationError(f"{self.job_id!r} cannot be a job id: it must be usable as a folder name")

    def job_dir(self) -> str:
        """Folder of everything of the job."""
        return self.job_id

    def checkpoint_dir(self, checkpoint_id: CheckpointId) -> str:
        """Folder of one checkpoint."""
        return f"{self.job_id}/{checkpoint_name(checkpoint_id)}"

    def metadata(self, checkpoint_id: CheckpointId) -> str:
        """The file whose existence makes a checkpoint complete."""
        return f"{self.checkpoint_dir(checkpoint_id)}/{METADATA_NAME}"

    def state_file(self, checkpoint_id: CheckpointId, vertex: VertexId, subtask: SubtaskIndex) -> str:
        """Exclusive state of one subtask."""
        return f"{self.checkpoint_dir(checkpoint_id)}/{escape(vertex)}-{subtask}"

    def shared_dir(self) -> str:
        """Folder of files that several checkpoints use."""
        return f"{self.job_id}/shared"

    def taskowned_dir(self) -> str:
        """Folder of files that tasks own."""
        return f"{self.job_id}/taskowned"

    def events_dir(self) -> str:
        """Folder of the event log."""
        return f"{self.job_id}/events"


def checkpoint_name(checkpoint_id: CheckpointId) -> str:
    """Folder name of a checkpoint: `chk-17`."""
    return f"{_CHECKPOINT_PREFIX}{checkpoint_id}"


def parse_checkpoint_name(name: str) -> CheckpointId | None:
    """Inverse of `checkpoint_name`; None for any other name."""
    digits = name.removeprefix(_CHECKPOINT_PREFIX)
    if digits == name or not (digits.isascii() and digits.isdigit()) or digits.startswith("0"):
        return None
    return CheckpointId(int(digits))


def parse_state_file_name(name: str) -> tuple[VertexId, SubtaskIndex] | None:
    """Vertex and subtask of the last part of a `state_file` path; None for any other name."""
    vertex, separator, digits = name.rpartition("-")
    if not separator or not (digits.isascii() and digits.isdigit()):
        return None
    return VertexId(unescape(vertex)), SubtaskIndex(int(digits))


def parse_pointer(path: str) -> tuple[str, JobId, CheckpointId]:
    """Root url, job and checkpoint of `<root>/<job>/chk-17`, with or without a trailing `/` or `/_metadata`.

    Raises ConfigurationError for anything else.
    """
    advice = "a checkpoint is given as <root>/<job>/chk-<number>, e.g. s3://bucket/checkpoints/my-job-1a2b3c4d/chk-17"
    trimmed = path.rstrip("/").removesuffix(f"/{METADATA_NAME}").rstrip("/")
    scheme, separator, rest = trimmed.partition("://")
    if not separator:
        scheme, rest = "", trimmed
    folder, _, name = rest.rpartition("/")
    checkpoint_id = parse_checkpoint_name(name)
    if checkpoint_id is None:
        raise ConfigurationError(f"{path!r} names no checkpoint: {name!r} is not chk-<number>; {advice}")
    folder = folder.rstrip("/")
    root, slash, job = folder.rpartition("/")
    bucket_missing = scheme.startswith("s3") and not root
    if job in ("", ".", "..") or bucket_missing:
        raise ConfigurationError(f"{path!r} names no job before {name!r}; {advice}")
    if not separator and not root:
        root = "/" if slash else "."
    return f"{scheme}{separator}{root}", JobId(job), checkpoint_id


def pointer(root_url: str, job_id: JobId, checkpoint_id: CheckpointId) -> str:
    """Inverse of `parse_pointer`."""
    return join_url(root_url, CheckpointLayout(job_id).checkpoint_dir(checkpoint_id))


def escape(text: str) -> str:
    """Any text as a part of a path: percent-encoded, and never hidden or special."""
    escaped = quote(text, safe="", errors="surrogatepass")
    return f"%2E{escaped[1:]}" if escaped.startswith(".") else escaped


def unescape(name: str) -> str:
    """Inverse of `escape`."""
    return unquote(name, errors="surrogatepass")

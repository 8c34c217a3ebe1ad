"""`FileSystemStore`: a `Store` over local folders, S3, Google Cloud Storage, Azure, HDFS or memory, chosen by the url.

Rules:

- Every error of a file system is raised as a StorageError that names the operation, the place and the cause.
- Paths cannot leave the root.
- A store pickles as its url and options, and opens again in any process.

`check_conditional_create` tests the storage before a job begins, because fencing and the completion of checkpoints
depend on conditional creates. It tests two things:

- A create of a name that exists is refused, and the file stays. This is tested at every place that a job uses.
- Of two racing creates of one name exactly one wins, and its bytes are stored. A store that checks for the file and
  then writes it (without atomicity) passes the first test, and fails the second only now and then, so several rounds of
  pairs race. The server or the disk decides the outcome, so each server or disk is tested once in a process. A create
  without an answer counts neither as won nor as lost. The files of the test are deleted.
"""

from __future__ import annotations

import errno
import getpass
import os
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain

from tidegate.storage.errors import (
    AlreadyExistsError,
    ConfigurationError,
    InvalidPathError,
    NotFoundError,
    StorageError,
)
from tidegate.storage.extras import need
from tidegate.storage.files.file_system import TEMPORARY_PREFIX, FileInfo, Files, MemoryFiles
from tidegate.storage.files.local_files import LocalFiles
from tidegate.storage.files.store import Buffer, Store

TIMEOUT_MS_DEFAULT = 60_000
WRITE_TIMEOUT_MS_DEFAULT = 600_000
_ONE_SLASH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")
_RAY_COPIES = "/runtime_resources/working_dir_files/"
_HINTS = {
    errno.ENOSPC: "; free some space there, or give another folder",
    errno.EDQUOT: "; free some space there, or raise the quota",
    errno.EROFS: "; make the file system writable, or give another folder",
}


class FileSystemStore:
    """A store of files under a URL. Thread-safe, picklable. `Store` documents the methods."""

    def __init__(self, url: str, **options: object) -> None:
        """Opens the store without touching the storage. Takes the arguments of `open_store`."""
        self._url, self._root, self._files = self._open(url, options)
        self._options = options

    @staticmethod
    def _open(url: str, options: dict[str, object]) -> tuple[str, str, Files]:
        """Returns the normalized URL, the key of the root, and the file system."""
        return _open_files(url, options)

    @property
    def url(self) -> str:
        return self._url

    @property
    def place(self) -> str:
        """Returns a text that identifies the disk or server on which creates exclude each other. Stores on one disk, or
        in one bucket, have equal texts.
        """
        return self._files.place(self._root)

    @property
    def repeats_requests(self) -> bool:
        """Returns True if transient errors are retried for some seconds before a StorageError is raised."""
        return self._files.repeats_requests

    def __repr__(self) -> str:
        return f"FileSystemStore({self._url!r})"

    def __reduce__(self) -> tuple[Callable[..., FileSystemStore], tuple[object, ...]]:
        return _reopen, (self._url, self._options)

    def write(self, path: str, chunks: Iterable[Buffer]) -> int:
        key = self._key(path)
        with self._reported("write", path):
            return self._files.write(key, chunks)

    def create(self, path: str, data: Buffer) -> None:
        key = self._key(path)
        with self._reported("create", path):
            won = self._files.create(key, data)
        if not won:
            raise AlreadyExistsError(
                f"cannot create {join_url(self._url, path)}: it exists already; give another name, or delete the file "
                "first"
            )

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        if offset < 0 or (length is not None and length < 0):
            raise InvalidPathError(
                f"cannot read {join_url(self._url, path)}: offset {offset} and length {length} must not be negative"
            )
        key = self._key(path)
        with self._reported("read", path):
            try:
                return self._files.read(key, offset, length)
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error):
                    raise OSError(
                        error.errno, f"the bucket does not exist: {error}; create it, or correct the URL"
                    ) from error
                raise NotFoundError(
                    f"there is no file {join_url(self._url, path)}; it was deleted, or the URL is wrong: correct it"
                ) from error

    def read_with_info(self, path: str, offset: int, length: int) -> tuple[bytes, FileInfo]:
        """Returns up to `length` bytes from `offset` on, and the `info` of the very file that was read.

        Raises NotFoundError.
        """
        key = self._key(path)
        with self._reported("read", path):
            try:
                data, found = self._files.read_with_info(key, offset, length)
            except FileNotFoundError as error:
                raise NotFoundError(
                    f"there is no file {join_url(self._url, path)}; it was deleted, or the URL is wrong: correct it"
                ) from error
        return data, replace(found, path=path)

    def exists(self, path: str) -> bool:
        key = self._key(path)
        with self._reported("look for", path):
            return self._files.exists(key)

    def list(self, prefix: str) -> list[str]:
        key = self._folder_key(prefix)
        with self._reported("list", prefix):
            return sorted(self._files.list(key))

    def delete(self, path: str) -> None:
        key = self._key(path)
        with self._reported("delete", path):
            self._files.delete(key)

    def delete_all(self, paths: Iterable[str]) -> None:
        keys = [self._key(path) for path in paths]
        if keys:
            with self._reported("delete", f"{len(keys)} files, among them {keys[0]}"):
                self._files.delete_all(keys)

    def delete_tree(self, prefix: str) -> None:
        key = self._folder_key(prefix)
        with self._reported("delete", prefix):
            self._files.delete_tree(key)

    def delete_temporary(self, prefix: str) -> int:
        """Deletes the unfinished files that killed writers left under a folder, and returns their number.

        No process may write there.
        """
        key = self._folder_key(prefix)
        with self._reported("clean", prefix):
            return self._files.delete_temporary(key)

    def walk(self, prefix: str, *, follow_links: bool = False) -> Sequence[FileInfo]:
        """Returns all files at any depth below a folder, sorted by path, which is relative to the folder.

        With `follow_links`, also the files in folders that are symbolic links, except links to an enclosing folder.
        """
        key = self._folder_key(prefix)
        with self._reported("list", prefix):
            return sorted(self._files.walk(key, follow_links=follow_links), key=lambda file: file.path)

    def info(self, path: str) -> FileInfo:
        """Returns size and modification time of one file. Raises NotFoundError if there is no such file."""
        key = self._key(path)
        with self._reported("look for", path):
            try:
                found = self._files.info(key)
            except FileNotFoundError as error:
                raise NotFoundError(
                    f"there is no file {join_url(self._url, path)}; it was deleted, or the URL is wrong: correct it"
                ) from error
        return replace(found, path=path)

    def _key(self, path: str) -> str:
        parts = path.split("/")
        if any(part in ("", ".", "..") or part.startswith(TEMPORARY_PREFIX) for part in parts) or "\0" in path:
            raise InvalidPathError(
                f"{path!r} is not a path inside {self._url}: it must be relative, without empty, '.', '..' "
                f"or '{TEMPORARY_PREFIX}…' parts"
            )
        return join_url(self._root, path)

    def _folder_key(self, prefix: str) -> str:
        prefix = prefix.rstrip("/")
        return self._key(prefix) if prefix else self._root

    @contextmanager
    def _reported(self, operation: str, path: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            hint = "; check credentials and permissions" if isinstance(error, PermissionError) else ""
            hint = _HINTS.get(error.errno or 0, hint)
            raise StorageError(f"cannot {operation} {join_url(self._url, path)}: {error}{hint}") from error


_MOUNTED = frozenset({"viewfs", "wasb", "wasbs", "oss", "cosn"})
_S3 = frozenset({"s3", "s3a"})
_GCS = frozenset({"gs", "gcs"})
_AZURE = frozenset({"abfs", "abfss", "az"})
_HDFS = frozenset({"hdfs", "webhdfs", "swebhdfs"})
HOSTED_SCHEMES = frozenset({*_S3, *_GCS, *_AZURE, *_HDFS})
"""The URL schemes after which the name of a bucket, a container or a server follows."""
RAY_MEMORY = "ray-memory"
"""URL scheme of checkpoints in the memory of a Ray actor."""
_SCHEMES = frozenset({"file", "local", "memory", RAY_MEMORY, "sim", *HOSTED_SCHEMES})
"""The URL schemes that any runtime of tidegate supports. `ray-memory` works only on Ray, `sim` only in the
simulator.
"""


def open_store(url: str | os.PathLike[str], **options: object) -> FileSystemStore:
    """Opens a store by url: `/folder`, `~/folder` or `file:///folder`, `s3://bucket/prefix`, `gs://bucket/prefix`,
    `abfs://container/prefix`, `hdfs://namenode/folder`, or `memory://name`.

    Options for S3 are the options of s3fs (`key`, `secret`, `endpoint_url`, …), `timeout_ms`, which bounds each request
    (default 60,000 ms), and `write_timeout_ms`, which bounds a whole write (default 600,000 ms). Without credentials or
    an endpoint the usual AWS environment variables apply. Google Cloud Storage takes the options of gcsfs, Azure the
    options of adlfs, and HDFS `user`; all of them take these two limits. Nothing is read or written yet. Raises
    ConfigurationError for another scheme or a wrong option.
    """
    return FileSystemStore(os.path.expanduser(os.fspath(url)), **options)


def check_outlives_ray(url: str, what: str) -> None:
    """Raises ConfigurationError for a local folder that Ray deletes. `what` names the data to be written there.

    A program of `ray job submit --working-dir`, and every process of a runtime environment with a `working_dir`, runs
    in a copy of that folder below Ray's session. Ray deletes the copy when no process runs in it any more, and a
    changed program gets another copy. A relative path leads into the copy.
    """
    path = local_path(url)
    if path is not None and _RAY_COPIES in f"{os.path.abspath(path)}/":
        raise ConfigurationError(
            f"{what} would be written to {os.path.abspath(path)}, which is inside the copy of the working_dir that Ray "
            "deletes after the job: give an absolute path of a folder that all nodes share, or s3://bucket/prefix"
        )


def join_url(root: str, path: str) -> str:
    """Returns `root` and a relative path with exactly one `/` between them; `root` itself for an empty path."""
    if not path:
        return root
    return f"{root}{path}" if root.endswith("/") else f"{root}/{path}"


def local_path(url: str) -> str | None:
    """Returns the path that a url of a local folder names, or None if it has the scheme of another store.

    Raises ConfigurationError if the url names no path, or a host, as `file://host/x` and `//host/x` do: the name of the
    host would become a folder on this machine. The same would happen to the scheme of `s3:/bucket/x`, which lacks a
    slash.
    """
    scheme, separator, rest = url.partition("://")
    if not separator and (found := _ONE_SLASH.match(url)) is not None:
        raise ConfigurationError(
            f"{url!r} looks like a URL that lacks a slash; write '{found[1]}://…', or './{url}' for a folder of that "
            "name"
        )
    if separator and scheme not in ("file", "local"):
        return None
    path = rest.removeprefix("localhost") if rest.startswith("localhost/") else rest if separator else url
    if not path:
        raise ConfigurationError("the storage url is empty; give a folder or s3://bucket/prefix")
    if path.startswith("//") or (separator and not path.startswith("/")):
        host = path.strip("/").partition("/")[0]
        raise ConfigurationError(
            f"{url!r} names the host {host!r}, but a folder is on this machine; write '/folder' or 'file:///folder'"
        )
    return path


def check_scheme(url: str) -> None:
    """Raises ConfigurationError if tidegate does not support the scheme of a URL. Nothing is opened."""
    scheme, separator, _ = url.partition("://")
    if local_path(url) is None and separator and scheme not in _SCHEMES:
        raise _no_storage(url, scheme)


def check_savepoint_target(url: str, what: str) -> None:
    """Raises ConfigurationError for a URL at which a savepoint cannot be stored, or would be deleted with its job.

    Nothing is opened. `what` names the savepoint in the error.
    """
    check_scheme(url)
    if url.startswith(f"{RAY_MEMORY}:"):
        raise ConfigurationError(
            f"{what} would be written to {url}, the memory of a Ray actor that ends with its driver: give a folder "
            "that all nodes share, or s3://bucket/prefix"
        )
    check_outlives_ray(url, what)


def _no_storage(url: str, scheme: str) -> ConfigurationError:
    hint = ""
    if scheme in _MOUNTED:
        hint = (
            ". Mount it as a folder that all nodes share, and give its path; or give the S3 interface of the same "
            "storage as s3://bucket/prefix"
        )
    return ConfigurationError(
        f"tidegate cannot store at {url!r}: {scheme!r} is not one of '/folder', 'file://', 's3://', 'gs://', "
        f"'abfs://', 'hdfs://', 'memory://'{hint}"
    )


def _reopen(url: str, options: dict[str, object]) -> FileSystemStore:
    return FileSystemStore(os.path.expanduser(os.fspath(url)), **options)


def _open_files(url: str, options: dict[str, object]) -> tuple[str, str, Files]:
    """Returns the normalized URL, the key of the root, and the file system of a URL."""
    path = local_path(url)
    if path is not None:
        _refuse_options(url, options)
        folder = os.path.abspath(path)
        return folder, folder, LocalFiles()
    scheme, _, rest = url.partition("://")
    rest = rest.strip("/")
    if scheme == "memory":
        _refuse_options(url, options)
        return f"memory://{rest}", f"/{rest}", MemoryFiles()
    if scheme in _S3:
        if not rest:
            raise ConfigurationError(f"{url!r} names no bucket; write s3://bucket/prefix")
        need(f"storage at {url}", "s3")
        # Imported late: s3fs costs every process half a second, and most never touch S3.
        from tidegate.storage.files.s3_files import S3Files

        more, timeout_ms, write_timeout_ms = _limits(options, url)
        return f"s3://{rest}", rest, S3Files(more, timeout_ms, write_timeout_ms)
    if scheme in _GCS:
        if not rest:
            raise ConfigurationError(f"{url!r} names no bucket; write gs://bucket/prefix")
        need(f"storage at {url}", "gcs")
        # Imported late, as gcsfs and Google's libraries cost a second.
        from tidegate.storage.files.gcs_client import GcsClient
        from tidegate.storage.files.object_files import ObjectFiles

        more, timeout_ms, write_timeout_ms = _limits(options, url)
        return f"gs://{rest}", rest, ObjectFiles(GcsClient(more), timeout_ms, write_timeout_ms)
    if scheme in _AZURE:
        container, _, path = rest.partition("/")
        container, _, host = container.partition("@")
        if not container:
            raise ConfigurationError(f"{url!r} names no container; write abfs://container/prefix")
        need(f"storage at {url}", "azure")
        from tidegate.storage.files.azure_client import AzureClient
        from tidegate.storage.files.object_files import ObjectFiles

        more, timeout_ms, write_timeout_ms = _limits(options, url)
        key = join_url(container, path)
        return f"abfs://{rest}", key, ObjectFiles(AzureClient(more, url, host), timeout_ms, write_timeout_ms)
    if scheme in _HDFS:
        return _open_hdfs(url, options)
    raise _no_storage(url, scheme)


def _open_hdfs(url: str, options: dict[str, object]) -> tuple[str, str, Files]:
    scheme, _, rest = url.partition("://")
    authority, _, path = rest.partition("/")
    path = path.strip("/")
    if "@" in authority:
        raise ConfigurationError(
            f"{url!r} names a user; write {scheme}://{authority.rpartition('@')[2]}/{path}, and set HADOOP_USER_NAME"
        )
    need(f"storage at {url}", "hdfs")
    from tidegate.storage.files.hdfs_files import HdfsFiles, name_nodes

    more, timeout_ms, write_timeout_ms = _limits(options, url)
    user = more.pop("user", None) or os.environ.get("HADOOP_USER_NAME") or getpass.getuser()
    _refuse_options(url, more)
    files = HdfsFiles(name_nodes(scheme, authority, url), str(user), timeout_ms, write_timeout_ms)
    return f"{scheme}://{join_url(authority, path)}" if authority else f"{scheme}:///{path}", f"/{path}", files


def _limits(options: dict[str, object], url: str) -> tuple[dict[str, object], int, int]:
    """Returns the options for a client without the time limits, the time limit of a request, and the time limit of a
    whole write. Both limits are in ms.
    """
    more = dict(options)
    timeout_ms = _milliseconds(more, "timeout_ms", TIMEOUT_MS_DEFAULT, url)
    return more, timeout_ms, _milliseconds(more, "write_timeout_ms", WRITE_TIMEOUT_MS_DEFAULT, url)


def _milliseconds(options: dict[str, object], name: str, default: int, url: str) -> int:
    """Removes an option from `options` and returns it as milliseconds."""
    value = options.pop(name, default)
    if not isinstance(value, int) or value <= 0:
        raise ConfigurationError(f"{name}={value!r} for {url}: give a positive number of milliseconds")
    return value


def _refuse_options(url: str, options: dict[str, object]) -> None:
    if options:
        raise ConfigurationError(f"storage option {sorted(options)[0]!r} does not apply to {url!r}; remove it")


PAIRS = 4
ROUNDS = 5
"""The number of rounds of races between two creates.

On a store that checks and then writes without atomicity, about one of four pairs has two winners. All twenty pairs have
one winner, and hide the fault, in one of 300 tests. For the same number of requests, pairs find as many faults as
larger races and end sooner, because some servers serialize all creates of one name.
"""
REQUESTS_MAX = 4 + PAIRS * (3 * ROUNDS + 1)

_found_atomic: set[tuple[type, str]] = set()
"""Servers and disks that have passed the test of racing creates in this process, as pairs of store type and place."""


def check_conditional_create(store: Store) -> None:
    """Checks that exactly one of several creates of one name succeeds, in sequence and concurrently.

    Makes at most `REQUESTS_MAX` requests. Raises ConfigurationError if several creates succeed: two coordinators could
    then both own a job. Raises StorageError if the storage does not answer.
    """
    path = f"_tidegate-probe-{uuid.uuid4().hex}"
    _check_sequential_creates(store, path)
    if getattr(store, "for_one_thread", False):
        return
    place = (type(store), store.place) if isinstance(store, FileSystemStore) else None
    if place in _found_atomic:
        return
    _check_racing_creates(store, path)
    if place is not None:
        _found_atomic.add(place)


def _check_sequential_creates(store: Store, path: str) -> None:
    store.create(path, b"first")
    try:
        try:
            store.create(path, b"second")
            refused = False
        except AlreadyExistsError:
            refused = True
        if not refused or store.read(path) != b"first":
            raise _refusal(store, "a second create of one name replaced the file")
    finally:
        store.delete(path)


def _check_racing_creates(store: Store, prefix: str) -> None:
    rounds = [[f"{prefix}-race-{number}-{pair}" for pair in range(PAIRS)] for number in range(ROUNDS)]
    decided = 0
    with ThreadPoolExecutor(2 * PAIRS, "tidegate-probe") as pool:
        try:
            for number, paths in enumerate(rounds, start=1):
                outcomes = list(pool.map(partial(_create, store), [p for p in paths for _ in (1, 2)], [1, 2] * PAIRS))
                winners = [_winner(store, path, outcomes[2 * i : 2 * i + 2]) for i, path in enumerate(paths)]
                decided += sum(winner is not None for winner in winners)
                if number < ROUNDS:
                    continue
                if not decided:
                    raise next(outcome for outcome in outcomes if isinstance(outcome, StorageError))
                for path, winner in zip(paths, winners, strict=True):
                    if winner is not None and store.read(path) != _mark(winner):
                        raise _refusal(store, f"{path} was replaced after its creator had won")
        finally:
            for _ in pool.map(store.delete, chain.from_iterable(rounds)):
                pass


def _create(store: Store, path: str, creator: int) -> bool | StorageError:
    """Creates a file with the mark of `creator`.

    Returns True on success, False if the file exists, or the error if the outcome is unknown.
    """
    try:
        store.create(path, _mark(creator))
    except AlreadyExistsError:
        return False
    except StorageError as error:
        return error
    return True


def _winner(store: Store, path: str, outcomes: Sequence[bool | StorageError]) -> int | None:
    """Returns which of two racing creators (1 or 2) has won, or None if that is unknown.

    Raises ConfigurationError if not exactly one won.
    """
    winners = [creator for creator, outcome in enumerate(outcomes, start=1) if outcome is True]
    unanswered = [outcome for outcome in outcomes if isinstance(outcome, StorageError)]
    if len(winners) > 1 or not (winners or unanswered):
        raise _refusal(store, f"of two creates of {path} at the same time {'both' if winners else 'none'} won")
    return winners[0] if winners else None


def _mark(creator: int) -> bytes:
    return f"creator {creator}".encode()


def _refusal(store: Store, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"the storage at {store.url} has no conditional create that is reliable ({why}): without one tidegate is "
        "not exactly-once. Use a local folder, AWS S3, Google Cloud Storage, Azure Blob Storage, HDFS, or a server "
        "that supports it"
    )

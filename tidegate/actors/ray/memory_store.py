"""Checkpoint storage in the memory of one small Ray actor, for jobs whose checkpoints need not outlive them.

Rules:

- The actor runs one call at a time, so a conditional create is atomic.
- It holds a limited number of bytes over all paths.
- Every call has a timeout, and a lost actor is a StorageError. All files are lost with the actor.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from tidegate.actors.ray.actor_calls import NAMESPACE
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.files.file_system import FileInfo, Files
from tidegate.storage.files.file_system_store import RAY_MEMORY, FileSystemStore, join_url, open_store
from tidegate.storage.files.store import Buffer

SCHEME = f"{RAY_MEMORY}://"
SIZE_BYTES_MAX_DEFAULT = 256 * 1024 * 1024
TIMEOUT_MS_DEFAULT = 30_000

_remote: Any = ray.remote


class HeldFiles:
    """The actor class that stores files in memory, in a dict by absolute key. The actor runs one call at a time."""

    def __init__(self, size_bytes_max: int) -> None:
        self._files: dict[str, bytes] = {}
        self._size_bytes = 0
        self._size_bytes_max = size_bytes_max

    def __repr__(self) -> str:
        """Returns the name under which Ray shows the actor in logs."""
        return f"checkpoints in memory, {self._size_bytes_max:,} bytes at most"

    def put(self, key: str, data: bytes, replace: bool) -> str | None:
        """Stores a file. Returns None, or why it cannot: "exists", "full", or "in the way" if a parent folder is
        a file.
        """
        if key in self._files and not replace:
            return "exists"
        parents = key.split("/")
        if any("/".join(parents[:n]) in self._files for n in range(1, len(parents))):
            return "in the way"
        size_bytes = self._size_bytes - len(self._files.get(key, b"")) + len(data)
        if size_bytes > self._size_bytes_max:
            return "full"
        self._files[key] = data
        self._size_bytes = size_bytes
        return None

    def get(self, key: str, offset: int, length: int | None) -> bytes | None:
        """Returns a range of the bytes of a file, or None if the file does not exist. `length` None reads to the
        end.
        """
        data = self._files.get(key)
        if data is None:
            return None
        return data[offset:] if length is None else data[offset : offset + length]

    def exists(self, key: str) -> bool:
        """Returns whether a file with this key exists."""
        return key in self._files

    def sizes(self, key: str) -> dict[str, int]:
        """Returns the size in bytes of every file below a folder, by the path relative to the folder."""
        prefix = f"{key.rstrip('/')}/"
        return {path[len(prefix) :]: len(data) for path, data in self._files.items() if path.startswith(prefix)}

    def delete(self, key: str) -> None:
        """Deletes a file, if it exists."""
        self._size_bytes -= len(self._files.pop(key, b""))

    def delete_tree(self, key: str) -> None:
        """Deletes a folder with all its files."""
        for path in self.sizes(key):
            self.delete(f"{key.rstrip('/')}/{path}")


class RayMemoryFiles:
    """The files in the memory of one actor (a `Files`), from any process of the Ray cluster."""

    repeats_requests = False

    def __init__(self, name: str, timeout_ms: int) -> None:
        """Creates the object for the actor that the URL names. Does not call the actor yet."""
        self._name = name
        self._timeout_s = timeout_ms / 1000
        self._actor: Any = None

    def place(self, key: str) -> str:
        return f"{SCHEME}{self._name}"

    def write(self, key: str, chunks: Iterable[Buffer]) -> int:
        data = b"".join(chunks)
        self._put(key, data, True)
        return len(data)

    def create(self, key: str, data: Buffer) -> bool:
        return self._put(key, bytes(data), False)

    def read(self, key: str, offset: int, length: int | None) -> bytes:
        data: bytes | None = self._ask("get", key, offset, length)
        if data is None:
            raise FileNotFoundError(errno.ENOENT, "there is no such file", key)
        return data

    def read_with_info(self, key: str, offset: int, length: int) -> tuple[bytes, FileInfo]:
        # Only this store creates its files, and it never changes one.
        return self.read(key, offset, length), self.info(key)

    def exists(self, key: str) -> bool:
        return bool(self._ask("exists", key))

    def list(self, key: str) -> list[str]:
        return list({path.split("/", 1)[0] for path in self._ask("sizes", key)})

    def delete(self, key: str) -> None:
        self._ask("delete", key)

    def delete_all(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.delete(key)

    def delete_tree(self, key: str) -> None:
        self._ask("delete_tree", key)

    def delete_temporary(self, key: str) -> int:
        return 0

    def walk(self, key: str, *, follow_links: bool = False) -> Iterator[FileInfo]:
        for path, size_bytes in self._ask("sizes", key).items():
            yield FileInfo(path, size_bytes)

    def info(self, key: str) -> FileInfo:
        folder, _, name = key.rpartition("/")
        size_bytes = self._ask("sizes", folder).get(name)
        if size_bytes is None:
            raise FileNotFoundError(errno.ENOENT, "there is no such file", key)
        return FileInfo(key, size_bytes)

    def _put(self, key: str, data: bytes, replace: bool) -> bool:
        refused: str | None = self._ask("put", key, data, replace)
        if refused == "full":
            raise OSError(
                errno.ENOSPC,
                f"the actor with the checkpoints in memory has no room for {len(data):,} more bytes; keep checkpoints "
                "in a folder or a bucket",
            )
        if refused == "in the way":
            raise NotADirectoryError(
                errno.ENOTDIR, "a file has the name of the folder that is needed; give another name", key
            )
        return refused is None

    def _ask(self, method: str, *arguments: object) -> Any:
        try:
            if self._actor is None:
                self._actor = ray.get_actor(actor_name(self._name), namespace=NAMESPACE)
            return ray.get(getattr(self._actor, method).remote(*arguments), timeout=self._timeout_s)
        except GetTimeoutError as error:
            raise TimeoutError(
                errno.ETIMEDOUT,
                f"the actor with the checkpoints in memory gave no answer within {self._timeout_s:g} s; check that "
                "its node is alive",
            ) from error
        except (RayError, ValueError) as error:
            # ValueError: no actor has this name.
            self._actor = None
            message = f"the actor {actor_name(self._name)!r} that holds the checkpoints is gone: {error}"
            raise OSError(errno.EIO, message) from error


class RayMemoryStore(FileSystemStore):
    """Files in the memory of an actor at `ray-memory://<name>`, or below a folder there."""

    def __init__(self, url: str, timeout_ms: int = TIMEOUT_MS_DEFAULT) -> None:
        """Opens the store of an actor that `start_memory` has started. Does not call the actor yet.

        Raises ConfigurationError for an url that does not begin with `ray-memory://` and a name.
        """
        super().__init__(url, timeout_ms=timeout_ms)

    @staticmethod
    def _open(url: str, options: dict[str, object]) -> tuple[str, str, Files]:
        rest = url.removeprefix(SCHEME).strip("/")
        if not url.startswith(SCHEME) or not rest:
            raise ConfigurationError(f"{url!r} is not the URL of a checkpoint memory; write {SCHEME}<name>")
        timeout_ms = options["timeout_ms"]
        assert isinstance(timeout_ms, int)
        return f"{SCHEME}{rest}", f"/{rest}", RayMemoryFiles(rest.partition("/")[0], timeout_ms)

    def __reduce__(self) -> tuple[Callable[..., FileSystemStore], tuple[object, ...]]:
        return RayMemoryStore, (self._url, self._options["timeout_ms"])


def open_store_on_ray(url: str) -> FileSystemStore:
    """Opens the store at a URL, as `open_store` does, and also at `ray-memory://<name>`. For processes on Ray."""
    return RayMemoryStore(url) if url.startswith(SCHEME) else open_store(url)


def start_memory(name: str) -> tuple[str, Any]:
    """Starts the actor, which holds at most `SIZE_BYTES_MAX_DEFAULT` bytes. Returns the URL of its store, and the
    handle of the actor.

    The actor lives until its last handle or the driver is gone. An existing actor of this name is used instead.
    """
    if not name or "/" in name:
        raise ConfigurationError(
            f"{name!r} cannot name a checkpoint memory; give a name that is not empty and has no '/'"
        )
    actor_class = _remote(num_cpus=0, max_restarts=0)(HeldFiles)
    options = actor_class.options(name=actor_name(name), namespace=NAMESPACE, get_if_exists=True)
    return join_url(SCHEME, name), options.remote(SIZE_BYTES_MAX_DEFAULT)


def actor_name(name: str) -> str:
    """Returns the name of the actor behind `ray-memory://<name>`."""
    return f"{name}/checkpoint-memory"

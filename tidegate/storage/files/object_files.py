"""`ObjectFiles`: files on Google Cloud Storage and Azure Blob Storage, objects by `bucket/name`.

`gcs_client.py` and `azure_client.py` make the requests, with the libraries that gcsfs and adlfs use. Rules:

- A conditional create stores a unique mark in the object's metadata. These libraries repeat a request that got no
  answer, and a repeated create may find the object of the first attempt. The mark shows which creator has won.
- A request has a time limit, which covers all of its attempts and pauses. It is cancelled at the limit.
- A large file is uploaded in parts, and only one of them is in memory. It becomes visible with the last part. The
  upload is aborted otherwise.
- A whole write has a time limit of its own, however many parts it has.
- A file is looked up by its name. Only `list` and `walk` list.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
import uuid
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from tidegate.storage.files.file_system import FileInfo
from tidegate.storage.files.store import Buffer

PART_BYTES = 16 * 1024 * 1024
"""Size of a part of an upload. Google Cloud Storage accepts multiples of 256 KiB."""
MARK = "tidegate"
"""The name of the metadata that has the mark of a creator."""
_DELETES_AT_ONCE = 16
_LOOP_GRACE_S = 5.0
"""Seconds that a caller waits beyond the time limit of a request, until the event loop has noticed the limit."""

T = TypeVar("T")

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Page:
    """One part (page) of a listing. `following` is the token of the next part, or None at the end."""

    files: tuple[FileInfo, ...]
    folders: tuple[str, ...]
    following: str | None


class ObjectClient(Protocol):
    """The interface of a client that makes the requests to one object storage service, as coroutines that run in
    `loop`.

    A failure raises OSError. It is a FileNotFoundError only if the object is missing, and not if the bucket is.
    """

    loop: asyncio.AbstractEventLoop
    server: str
    """The name of the server, with the account."""
    advice: str
    """Advice about credentials for a request that is refused or not answered. Empty if credentials were given."""

    async def put(self, bucket: str, name: str, data: bytes, mark: str | None) -> None:
        """Writes an object in one request. With a `mark`, which identifies the writer, raises FileExistsError if the
        name is taken.
        """
        ...

    async def begin(self, bucket: str, name: str) -> Any:
        """Begins an upload in parts. Returns a handle for `add` and `give_up`."""
        ...

    async def add(self, upload: Any, data: bytearray, *, last: bool) -> None:
        """Adds the next part to an upload. The last part makes the object visible."""
        ...

    async def give_up(self, upload: Any) -> None:
        """Aborts an upload. Its parts never become visible."""
        ...

    async def get(self, bucket: str, name: str, offset: int, length: int | None) -> tuple[bytes, FileInfo]:
        """Returns a range of an object's bytes (empty after its end), and the object's description without the path."""
        ...

    async def head(self, bucket: str, name: str) -> tuple[FileInfo, str | None]:
        """Returns the description of an object without the path, and the mark with which it was written."""
        ...

    async def page(self, bucket: str, prefix: str, flat: bool, following: str | None) -> Page:
        """Returns one page of the objects whose names begin with `prefix`, sorted by name.

        With `flat`, objects in folders below are included. Otherwise the page has the names of these folders instead.
        """
        ...

    async def delete(self, bucket: str, name: str) -> None:
        """Deletes an object. Raises FileNotFoundError if there is none."""
        ...


class ObjectFiles:
    """A `Files` for object storage, in which a key is `bucket/name`."""

    repeats_requests = True

    def __init__(self, client: ObjectClient, timeout_ms: int, write_timeout_ms: int) -> None:
        """Creates the object. `timeout_ms` limits each request including its retries, in ms. `write_timeout_ms` limits
        a whole write.
        """
        self._client = client
        self._timeout_s = timeout_ms / 1000
        self._write_timeout_s = write_timeout_ms / 1000

    def place(self, key: str) -> str:
        return f"{key.partition('/')[0]} {self._client.server}"

    def write(self, key: str, chunks: Iterable[Buffer]) -> int:
        deadline_s = time.monotonic() + self._write_timeout_s
        bucket, name = _split(key)
        parts = _parts(chunks)
        part = next(parts, bytearray())
        following = next(parts, None)
        if following is None:
            self._wait(self._client.put(bucket, name, bytes(part), None))
            return len(part)
        upload = self._wait(self._client.begin(bucket, name))
        size_bytes = 0
        try:
            while following is not None:
                self._wait(self._client.add(upload, part, last=False))
                size_bytes += len(part)
                part = following
                following = next(parts, None)
                if time.monotonic() > deadline_s:
                    raise TimeoutError(
                        errno.ETIMEDOUT,
                        f"the write did not end within {self._write_timeout_s:g} s; check the network to the store",
                    )
            self._wait(self._client.add(upload, part, last=True))
        except BaseException:
            self._give_up(upload, key)
            raise
        return size_bytes + len(part)

    def _give_up(self, upload: Any, key: str) -> None:
        try:
            self._wait(self._client.give_up(upload))
        except OSError as error:
            _logger.warning(
                "Could not abort the upload of %s. Its parts take up space for a week, and are deleted then: %s",
                key,
                error,
            )

    def create(self, key: str, data: Buffer) -> bool:
        bucket, name = _split(key)
        mark = uuid.uuid4().hex
        try:
            self._wait(self._client.put(bucket, name, bytes(data), mark))
        except FileExistsError:
            try:
                return self._wait(self._client.head(bucket, name))[1] == mark
            except FileNotFoundError:
                return False
        return True

    def read(self, key: str, offset: int, length: int | None) -> bytes:
        if length == 0:
            self.info(key)
            return b""
        return self._wait(self._client.get(*_split(key), offset, length))[0]

    def read_with_info(self, key: str, offset: int, length: int) -> tuple[bytes, FileInfo]:
        data, found = self._wait(self._client.get(*_split(key), offset, length))
        return data, replace(found, path=key)

    def exists(self, key: str) -> bool:
        try:
            self.info(key)
        except FileNotFoundError:
            return False
        return True

    def list(self, key: str) -> list[str]:
        names: list[str] = []
        for page in self._pages(key, flat=False):
            names += [file.path for file in page.files]
            names += page.folders
        return names

    def delete(self, key: str) -> None:
        self.delete_all([key])

    def delete_all(self, keys: Sequence[str]) -> None:
        for begin in range(0, len(keys), _DELETES_AT_ONCE):
            some = keys[begin : begin + _DELETES_AT_ONCE]
            self._wait(self._delete([_split(key) for key in some]))

    def delete_tree(self, key: str) -> None:
        for page in self._pages(key, flat=True):
            self.delete_all([f"{key.rstrip('/')}/{file.path}" for file in page.files])

    def delete_temporary(self, key: str) -> int:
        """Does nothing: both services delete the parts of unfinished uploads after a week."""
        return 0

    def walk(self, key: str, *, follow_links: bool = False) -> Iterator[FileInfo]:
        for page in self._pages(key, flat=True):
            yield from page.files

    def info(self, key: str) -> FileInfo:
        return replace(self._wait(self._client.head(*_split(key)))[0], path=key)

    def _pages(self, key: str, *, flat: bool) -> Iterator[Page]:
        """Yields all pages of the listing of a folder, with paths relative to the folder."""
        bucket, name = _split(key)
        prefix = f"{name.rstrip('/')}/" if name.rstrip("/") else ""
        following: str | None = None
        while True:
            page = self._wait(self._client.page(bucket, prefix, flat, following))
            # Some tools leave an object named like the folder itself.
            files = (replace(file, path=file.path[len(prefix) :]) for file in page.files if file.path != prefix)
            folders = tuple(folder[len(prefix) :].rstrip("/") for folder in page.folders)
            yield Page(tuple(files), tuple(folder for folder in folders if folder), page.following)
            if page.following is None:
                return
            following = page.following

    async def _delete(self, objects: Sequence[tuple[str, str]]) -> None:
        async def one(bucket: str, name: str) -> None:
            try:
                await self._client.delete(bucket, name)
            except FileNotFoundError:
                return

        await asyncio.gather(*(one(bucket, name) for bucket, name in objects))

    def _wait(self, request: Coroutine[Any, Any, T]) -> T:
        """Runs a request and returns its result. Raises OSError."""

        async def bounded() -> T:
            async with asyncio.timeout(self._timeout_s):
                return await request

        future = asyncio.run_coroutine_threadsafe(bounded(), self._client.loop)
        try:
            return future.result(self._timeout_s + _LOOP_GRACE_S)
        except TimeoutError as error:
            text = f"no answer within {self._timeout_s:g} s; is the endpoint reachable?{self._advice()}"
            raise TimeoutError(errno.ETIMEDOUT, text) from error
        except PermissionError as error:
            raise PermissionError(error.errno, f"{error.strerror or error}{self._advice()}") from error
        finally:
            # The caller may have been interrupted.
            future.cancel()

    def _advice(self) -> str:
        return f" {self._client.advice}" if self._client.advice else ""


def _split(key: str) -> tuple[str, str]:
    bucket, _, name = key.partition("/")
    return bucket, name


def _parts(chunks: Iterable[Buffer]) -> Iterator[bytearray]:
    """Cuts chunks into parts of PART_BYTES each, the last one smaller."""
    pending = bytearray()
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        while len(pending) + len(view) > PART_BYTES:
            room = PART_BYTES - len(pending)
            pending += view[:room]
            view = view[room:]
            yield pending
            pending = bytearray()
        pending += view
    if pending:
        yield pending

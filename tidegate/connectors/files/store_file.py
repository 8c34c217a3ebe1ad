"""`StoreFile`: a Python file object over a file in a store, which Arrow reads by byte ranges."""

from __future__ import annotations

import io
from collections.abc import Callable

import pyarrow as pa

from tidegate.storage.errors import ConfigurationError, StorageError
from tidegate.storage.files.file_system_store import join_url
from tidegate.storage.files.store import Store

CHUNK_BYTES = 8 * 2**20
"""Size in bytes of one request when a whole file is read."""
_COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}


class StoreFile(io.RawIOBase):
    """A file in a store, `size_bytes` long, as a Python file object.

    `failure` stores the error of a read, because Arrow may wrap the exception.
    """

    def __init__(self, url: str, size_bytes: int, read: Callable[[int, int], bytes]) -> None:
        """`read(at, size)` returns `size` bytes of the file from position `at`.

        It may raise StorageError or ConfigurationError.
        """
        super().__init__()
        self.url = url
        self._size_bytes = size_bytes
        self._read = read
        self._at = 0
        self.failure: StorageError | ConfigurationError | None = None

    @staticmethod
    def of(store: Store, path: str, size_bytes: int) -> StoreFile:
        """Returns a file object for the file at `path` of a store."""
        return StoreFile(join_url(store.url, path), size_bytes, lambda at, size: store.read(path, at, size))

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def size(self) -> int:
        """Returns the size of the file in bytes. Arrow calls this."""
        return self._size_bytes

    def close(self) -> None:
        """Does nothing: no handle is open, and another reader may still use the object."""

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        begin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size_bytes}[whence]
        self._at = begin + offset
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Reads into a buffer, for Python's buffered reader. Returns the number of bytes read."""
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._size_bytes - self._at)
        wanted = left if size < 0 else min(size, left)
        if not wanted:
            return b""
        try:
            data = self._read(self._at, wanted)
        except (StorageError, ConfigurationError) as error:
            self.failure = error
            raise
        self._at += len(data)
        return data


def compression_of(path: str) -> str | None:
    """Returns the codec that the suffix of a path names, such as "gzip" for `.gz`, or None."""
    return next((codec for suffix, codec in _COMPRESSIONS.items() if path.endswith(suffix)), None)


def without_compression(path: str) -> str:
    """Returns the path without the suffix of a compression codec."""
    return next((path[: -len(suffix)] for suffix in _COMPRESSIONS if path.endswith(suffix)), path)


def text_stream(file: StoreFile, path: str) -> pa.NativeFile:
    """Opens a text file as a stream of decompressed bytes, from its start."""
    buffered = io.BufferedReader(file, CHUNK_BYTES)
    return pa.input_stream(pa.PythonFile(buffered, mode="r"), compression=compression_of(path))

"""`KeyReader`: reads the database keys of one state from the first to the last, some at a time."""

from __future__ import annotations

from tidegate.state.rocksdb.database_session import RocksSession
from tidegate.storage.rocksdb.database import reported
from tidegate.storage.rocksdb.value_layout import HEAD


class KeyReader:
    """Of what comes or goes between two calls it may give keys or not; all others it gives."""

    def __init__(self, session: RocksSession, number: int) -> None:
        self._session = session
        self._all = [HEAD.pack(group, number) for group in session.key_groups]
        self.begin()

    def begin(self) -> None:
        """From the first one again."""
        self._start, self._prefixes = self._all[0], self._all

    def read(self, keys_max: int) -> tuple[list[bytes], bool]:
        """The next keys, at most so many, and whether there are no more. StorageError, CorruptionError."""
        prefixes, keys, ended = self._prefixes, list[bytes](), False
        with reported("read RocksDB", self._session.folder):
            cursor = self._session.database.iter()
            cursor.seek(self._start)
            for _ in range(keys_max):
                if (key := cursor.key()) is not None and key.startswith(prefixes[0]):
                    keys.append(key)
                    cursor.next()
                elif len(prefixes) > 1:
                    prefixes = prefixes[1:]
                    cursor.seek(prefixes[0])
                else:
                    ended = True
                    break
            cursor.status()
        last = keys[-1] if keys and keys[-1].startswith(prefixes[0]) else None
        self._start, self._prefixes = prefixes[0] if last is None else last + b"\0", prefixes
        return keys, ended

"""`EventSegments`: what was cut from an event log and is kept: a file for every so many entries.

    <root>/<job>/events/kept/000000000000-000000000999

`EventLog` writes and reads them. Rules:

- A segment is whole before its entries are deleted. After a crash between the two they are in both, and equal.
- Entries are in it byte for byte as they were, so one that cannot be read spoils no other.
- No coordinator needs a segment. They are for those who ask what has happened.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tidegate.storage.codec import decode, encode, wire
from tidegate.storage.errors import CorruptionError
from tidegate.storage.files.envelope import seal, unseal
from tidegate.storage.files.file_system_store import join_url
from tidegate.storage.files.store import Store

SEGMENT_ENTRIES = 1_000
_VERSION = 1
_MAGIC = b"TGEVKEPT"
_FOLDER = "kept"


@wire
@dataclass(frozen=True, slots=True)
class EventSegment:
    """Entries of a log as they lay there, by their indices."""

    indices: tuple[int, ...]
    entries: tuple[bytes, ...]


class EventSegments:
    """The segments of one log, whose folder is `events`. `digits`: of an index in the name of a file."""

    def __init__(self, store: Store, events: str, digits: int) -> None:
        self._store = store
        self._folder = f"{events}/{_FOLDER}"
        self._digits = digits

    def write(self, entries: Mapping[int, bytes]) -> None:
        """Keep entries; no order is asked for. Writing them again is safe. StorageError."""
        indices = tuple(sorted(entries))
        segment = EventSegment(indices, tuple(entries[index] for index in indices))
        span = range(indices[0], indices[-1] + 1)
        self._store.write(self._path(span), [seal(_MAGIC, _VERSION, encode(segment))])

    def spans(self, from_index: int = 0) -> list[range]:
        """From which index to which there are segments that reach beyond `from_index`; in order. Lists the folder."""
        found = []
        for name in self._store.list(self._folder):
            first, _, last = name.partition("-")
            if first.isdigit() and last.isdigit() and int(last) >= from_index:
                found.append(range(int(first), int(last) + 1))
        return sorted(found, key=lambda span: (span.start, span.stop))

    def read(self, span: range) -> dict[int, bytes]:
        """The entries of a segment. CorruptionError for damage, CodecError for another version, NotFoundError."""
        path = self._path(span)
        where = join_url(self._store.url, path)
        segment = decode(unseal(_MAGIC, _VERSION, self._store.read(path), where))
        if not isinstance(segment, EventSegment):
            raise CorruptionError(f"{where} does not hold entries of an event log")
        return dict(zip(segment.indices, segment.entries, strict=True))

    def _path(self, span: range) -> str:
        return f"{self._folder}/{span.start:0{self._digits}d}-{span.stop - 1:0{self._digits}d}"

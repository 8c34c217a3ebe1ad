"""SST files that are made here are RocksDB's: it finds every entry in them, no other, and whatever is damaged."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import rocksdict
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tidegate.state.kernels.columns import NO_MASK, Strings
from tidegate.state.rocksdb.keys import order_of, strings_of
from tidegate.state.rocksdb.row_writer import SLACK_BYTES, Slice, sst_file
from tidegate.storage.state.rocksdb.database import open_database, open_files

_KEYS = st.one_of(
    st.binary(min_size=1, max_size=40),
    st.tuples(st.sampled_from([b"", b"prefix", b"prefix of some length", bytes(200)]), st.integers(0, 300)).map(
        lambda parts: parts[0] + parts[1].to_bytes(8, "little")
    ),
)
_VALUES = st.one_of(st.binary(max_size=30), st.integers(0, 20_000).map(bytes))
_ENTRIES = st.dictionaries(_KEYS, _VALUES, max_size=80)

_FILTER = 1
"""Which part of a file it is."""


def strings(parts: list[bytes]) -> Strings:
    """As arrays, with the slack that an SST file needs."""
    data = np.frombuffer(b"".join(parts) + bytes(SLACK_BYTES), dtype=np.uint8)
    return Strings(np.array([0, *accumulate(map(len, parts))], dtype=np.int64), data, NO_MASK)


def take_in(database: rocksdict.Rdict, folder: Path, entries: Mapping[bytes, bytes | None], block_bytes: int) -> None:
    """Put entries by an SST file, and remove those without a value by another one."""
    for removes in (False, True):
        some = {key: value for key, value in entries.items() if (value is None) == removes}
        if some:
            keys = strings([*some])
            values = None if removes else strings([value or b"" for value in some.values()])
            path = folder / f"{removes}.new"
            path.write_bytes(b"".join(sst_file([Slice(keys, values, order_of(keys))], block_bytes)))
            database.ingest_external_file([str(path)])
            path.unlink()


def found_in(database: rocksdict.Rdict) -> dict[bytes, bytes]:
    """All that a database has, in its order."""
    cursor = database.iter()
    cursor.seek_to_first()
    found = {}
    while cursor.valid():
        found[cursor.key()] = cursor.value()
        cursor.next()
    cursor.status()
    return found


@settings(max_examples=60, deadline=None)
@given(
    first=_ENTRIES, second=st.dictionaries(_KEYS, st.none() | _VALUES, max_size=40), block_bytes=st.integers(1, 9_000)
)
@example({b"a": b"", b"a\0": b"1", b"a" * 200: bytes(20_000)}, {b"a": None, b"b": b""}, 8_192)
@pytest.mark.slow
def test_rocksdb_finds_what_was_put(
    first: dict[bytes, bytes], second: dict[bytes, bytes | None], block_bytes: int
) -> None:
    """By a scan and by key, also of files that lie over each other, before and after a compaction and a reopening."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        database = open_database(str(folder / "db"), 1 << 20)
        removed = {key: None for key, turn in zip(first, range(len(first)), strict=True) if turn % 3 == 0}
        second = {**removed, **second}
        take_in(database, folder, first, block_bytes)
        take_in(database, folder, second, block_bytes)
        expected = {key: value for key, value in {**first, **second}.items() if value is not None}
        expected = dict(sorted(expected.items()))
        for turn in range(3):
            found = found_in(database)
            assert found == expected
            assert list(found) == list(expected)
            asked = [*expected, *(key for key in second if key not in expected)]
            assert database.get(asked) == [expected.get(key) for key in asked]
            if turn == 0:
                database.compact_range(None, None)
            if turn == 1:
                database.close()
                database = open_files(str(folder / "db"), 1 << 20)
        database.close()


@given(st.lists(st.one_of(_KEYS, st.binary(min_size=20, max_size=20)), min_size=1, max_size=60))
@example([bytes([0, number % 3, 0, 1, 1]) + number.to_bytes(8, "little") for number in range(200)])
@example([b"the first word is the same" + bytes([255 - number]) for number in range(100)])
def test_rows_come_in_the_order_of_bytes(keys: list[bytes]) -> None:
    """Whether they are of one width or not, and whatever they begin with."""
    for width in (None, 12):
        some = keys if width is None else [key[:width].ljust(width, b"\0") for key in keys]
        encoded = strings(some)
        assert strings_of(encoded, order_of(encoded)) == sorted(some)


@pytest.mark.parametrize("keys", [[b"b", b"a"], [b"a", b"a"], [b"ab", b"a"], [b"\xff" * 9, b"\x7f" * 9]])
def test_keys_that_do_not_ascend_are_refused(keys: list[bytes]) -> None:
    """RocksDB believes what the file says, and would find the wrong row."""
    with pytest.raises(AssertionError, match="must ascend"):
        list(sst_file([Slice(strings(keys), strings([b""] * len(keys)), np.arange(len(keys)))], 8_192))


def test_a_key_that_is_not_there_is_hardly_looked_for(tmp_path: Path) -> None:
    """The filter is read as it was written: of absent keys RocksDB says at once that they are not there."""
    database = open_database(str(tmp_path / "db"), 1 << 20)
    keys = [number.to_bytes(8, "little") + b"key" for number in range(0, 6_000, 2)]
    take_in(database, tmp_path, dict.fromkeys(keys, b"value"), 8_192)
    assert database.get(keys) == [b"value"] * len(keys)
    absent = [number.to_bytes(8, "little") + b"key" for number in range(1, 6_000, 2)]
    assert sum(database.key_may_exist(key) for key in absent) < len(absent) // 30
    assert all(database.key_may_exist(key) for key in keys)
    database.close()


def taken_in(folder: Path, file: bytes) -> dict[bytes, bytes]:
    """What a new database has that takes in a file."""
    (folder / "file").write_bytes(file)
    database = open_database(str(folder / "db"), 1 << 20)
    try:
        database.ingest_external_file([str(folder / "file")])
        database.get([bytes(8)])
        return found_in(database)
    finally:
        database.close()


def test_whatever_is_damaged_is_found(tmp_path: Path) -> None:
    """A bit that flips in any part of the file, or an end that is missing: no row comes of it.

    RocksDB does without a filter that is damaged.
    """
    parts = [number.to_bytes(8, "big") for number in range(2_000)]
    rows = dict(zip(parts, parts, strict=True))
    file = [bytes(part) for part in sst_file([Slice(strings(parts), strings(parts), np.arange(2_000))], 8_192)]
    whole = b"".join(file)
    ends = [0, *accumulate(map(len, file))]
    for turn, (start, stop) in enumerate(pairwise(ends)):
        for place in (start, start + 1, (start + stop) // 2, stop - 2):
            folder = tmp_path / f"{turn} {place}"
            folder.mkdir()
            damaged = bytearray(whole)
            damaged[place] ^= 4
            if turn == _FILTER:
                assert taken_in(folder, damaged) == rows
            elif turn < len(file) - 1 or place != (start + stop) // 2:  # half of the footer is empty
                with pytest.raises(Exception, match=r"Corruption|Not implemented"):
                    taken_in(folder, damaged)
    (tmp_path / "short").mkdir()
    with pytest.raises(Exception, match="Corruption"):
        taken_in(tmp_path / "short", whole[:-1])
    assert taken_in(tmp_path, whole) == rows

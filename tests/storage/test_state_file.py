"""State files give back what was stored, cut at any key groups, and hide no damage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_strategies import operator_tables, same_tables, state_tables

from tidegate.storage.errors import CodecError, ConfigurationError, CorruptionError, NotFoundError
from tidegate.storage.filesystem import FileSystemStore, open_store
from tidegate.storage.ids import OperatorUid
from tidegate.storage.metadata import StateHandle, StateKind
from tidegate.storage.state import StateTable
from tidegate.storage.state_file import read_footer, read_state, verify_state, write_state

_Tables = list[tuple[OperatorUid, StateTable]]
_UID = OperatorUid("counts")
_MEMORY = open_store("memory://state-file-tests")


def _keyed(sizes: Sequence[int], name: str = "n") -> StateTable:
    sums = tuple(accumulate(sizes, initial=0))
    return StateTable(name, StateKind.KEYED, pa.record_batch({"k": range(sums[-1]), "v": range(sums[-1])}), sums)


def _write(tables: _Tables, *, inline: bool = False, store: FileSystemStore = _MEMORY) -> StateHandle:
    handle = write_state(store, "job/chk-1/v-0", tables, inline_bytes_max=2**30 if inline else 0)
    assert handle is not None
    return handle


@given(tables=operator_tables(), inline=st.booleans())
@settings(max_examples=25)
def test_tables_come_back(tables: _Tables, inline: bool) -> None:
    """Every operator reads its own tables, in order, from a file as from inlined bytes; what is stored verifies."""
    handle = _write(tables, inline=inline)

    verify_state(_MEMORY, handle)
    for uid in {uid for uid, _ in tables}:
        stored = [table for owner, table in tables if owner == uid]
        found = read_state(_MEMORY, handle, uid)
        assert len(found) == len(stored)
        assert all(map(same_tables, found, stored))
    assert read_state(_MEMORY, handle, OperatorUid("nobody")) == []


@given(table=state_tables().filter(lambda t: t.kind is StateKind.KEYED), data=st.data())
@settings(max_examples=25)
def test_any_cut_gives_every_row_once(table: StateTable, data: st.DataObject) -> None:
    """Ranges that partition the key groups return, in order, just the rows of each group, with rebased counts."""
    groups = len(table.key_group_rows) - 1
    cuts = data.draw(st.lists(st.integers(0, groups), max_size=4).map(sorted))
    handle = _write([(_UID, table)])

    parts: list[pa.RecordBatch] = []
    for start, stop in pairwise([0, *cuts, groups]):
        found = read_state(_MEMORY, handle, _UID, range(start, stop))
        here = table.key_group_rows[stop] - table.key_group_rows[start]
        assert len(found) == (1 if here else 0)
        for part in found:
            assert len(part.key_group_rows) == groups + 1
            for group in range(groups):
                expected = table.key_group_rows[group + 1] - table.key_group_rows[group]
                counted = part.key_group_rows[group + 1] - part.key_group_rows[group]
                assert counted == (expected if start <= group < stop else 0)
            assert part.key_group_rows[-1] == part.rows.num_rows
            parts.append(part.rows)
    schema = table.rows.schema
    assert pa.Table.from_batches(parts, schema).equals(pa.Table.from_batches([table.rows], schema))


@pytest.mark.parametrize("kind", [StateKind.LIST, StateKind.UNION, StateKind.BROADCAST])
def test_only_keyed_state_is_cut(kind: StateKind) -> None:
    """State without keys comes whole, whatever key groups are asked for."""
    table = StateTable("s", kind, pa.record_batch({"x": [1, 2]}))

    (found,) = read_state(_MEMORY, _write([(_UID, table)]), _UID, range(1))

    assert same_tables(found, table)


def test_groups_beyond_the_max_parallelism_are_refused() -> None:
    """A job with another max parallelism than the state's is told so, rather than given the wrong keys."""
    handle = _write([(_UID, _keyed([1, 2, 1]))])

    with pytest.raises(ConfigurationError, match="max parallelism 3"):
        read_state(_MEMORY, handle, _UID, range(2, 4))


def test_no_tables_make_no_handle() -> None:
    """A subtask without state stores nothing."""
    assert write_state(_MEMORY, "job/chk-1/none-0", []) is None
    assert not _MEMORY.exists("job/chk-1/none-0")


def test_small_state_is_inlined_up_to_the_limit(memory_store: FileSystemStore) -> None:
    """State of exactly the limit is inlined and leaves no file; one byte more is written."""
    tables = [(_UID, _keyed([1, 1]))]
    size_bytes = _write(tables, inline=True).size_bytes

    inlined = write_state(memory_store, "p/v-0", tables, inline_bytes_max=size_bytes)
    assert inlined is not None
    assert (inlined.path, len(inlined.inline or b"")) == (None, size_bytes)
    assert not memory_store.exists("p/v-0")

    written = write_state(memory_store, "p/v-0", tables, inline_bytes_max=size_bytes - 1)
    assert written is not None
    assert (written.path, written.inline) == ("p/v-0", None)
    assert memory_store.read("p/v-0") == inlined.inline


def test_equal_state_makes_equal_bytes() -> None:
    """The format has no clock and no chance in it."""
    tables = [(_UID, _keyed([3, 0, 2]))]

    assert _write(tables, inline=True) == _write(tables, inline=True)


def test_a_file_tells_what_is_in_it() -> None:
    """The footer gives the handle's sections, from the end of the file alone and from the whole of it."""
    handle = _write([(_UID, _keyed([2, 1])), (OperatorUid("other"), _keyed([1, 1], "m"))])
    assert handle.path is not None

    assert read_footer(_MEMORY, handle.path, handle.size_bytes) == handle.sections
    assert read_footer(_MEMORY, handle.path) == handle.sections


def test_every_flipped_bit_is_found() -> None:
    """Whichever bit of inlined state or of a file is flipped, verification finds it; no reader returns other rows."""
    stored = _keyed([2, 0, 1])
    handle = _write([(_UID, stored)], inline=True)
    path_handle = replace(handle, path="flipped", inline=None)
    assert handle.inline is not None

    for position in range(handle.size_bytes):
        damaged = bytearray(handle.inline)
        damaged[position] ^= 1 << position % 8
        _MEMORY.write("flipped", [damaged])
        for broken in (replace(handle, inline=bytes(damaged)), path_handle):
            with pytest.raises(CorruptionError):
                verify_state(_MEMORY, broken)
            assert _rows_or_error(broken) in (stored.rows.to_pylist(), "damaged")
        with pytest.raises(CorruptionError):
            read_footer(_MEMORY, "flipped")
        assert _footer_or_error("flipped", handle.size_bytes) in (handle.sections, "damaged")


@given(tables=operator_tables(), inline=st.booleans(), data=st.data())
@settings(max_examples=25)
def test_any_damage_is_found(tables: _Tables, inline: bool, data: st.DataObject) -> None:
    """A flipped bit, a lost end and added bytes at any place of any state are CorruptionError."""
    handle = _write(tables, inline=inline)
    content = bytearray(handle.inline if handle.inline is not None else _MEMORY.read(handle.path or ""))
    position = data.draw(st.integers(0, len(content) - 1))
    kind = data.draw(st.sampled_from(["flip", "cut", "add"]))
    if kind == "flip":
        content[position] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "cut":
        del content[position:]
    else:
        content[position:position] = data.draw(st.binary(min_size=1, max_size=9))
    _MEMORY.write("job/chk-1/v-0", [content])
    damaged = replace(handle, inline=bytes(content)) if inline else handle

    with pytest.raises(CorruptionError, match="damaged"):
        verify_state(_MEMORY, damaged)


def test_a_lost_file_is_not_found() -> None:
    """A file that is gone is NotFoundError, for reading as for verifying."""
    handle = replace(_write([(_UID, _keyed([1]))]), path="gone")

    for read in (lambda: verify_state(_MEMORY, handle), lambda: read_state(_MEMORY, handle, _UID)):
        with pytest.raises(NotFoundError, match="gone"):
            read()


def test_a_file_of_a_newer_version_is_named_as_such() -> None:
    """An intact file of a later format is not called damaged."""
    handle = _write([(_UID, _keyed([1]))])
    newer = bytearray(_MEMORY.read(handle.path or ""))
    newer[8] = 99
    _MEMORY.write("newer", [newer])

    with pytest.raises(CodecError, match="format version 99"):
        read_footer(_MEMORY, "newer", handle.size_bytes)


def test_rows_that_do_not_match_their_key_groups_are_not_written() -> None:
    """Prefix sums that do not end at the number of rows are refused before they are stored."""
    wrong = replace(_keyed([1, 1]), key_group_rows=(0, 1, 3))

    with pytest.raises(CorruptionError, match="no prefix sums of 2 rows"):
        _write([(_UID, wrong)])


@dataclass
class _CountingStore:
    """Counts the bytes that are read from a store."""

    inner: FileSystemStore
    url: str = "memory://counted"
    ranges: list[tuple[int, int | None]] = field(default_factory=list)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Note the range, then read it."""
        self.ranges.append((offset, length))
        return self.inner.read(path, offset, length)


def test_reads_no_more_than_the_sections_it_needs() -> None:
    """Of a file with several states one reads the ranges of one's own; none for key groups without rows."""
    handle = _write([(OperatorUid("big"), _keyed([500, 500])), (_UID, _keyed([3, 0])), (_UID, _keyed([0, 3], "m"))])
    counting = _CountingStore(_MEMORY)

    (found,) = read_state(counting, handle, _UID, range(1, 2))  # type: ignore[arg-type]

    section = handle.sections[2]
    assert found.state == "m"
    assert counting.ranges == [(section.offset, section.length_bytes)]


def _rows_or_error(handle: StateHandle) -> object:
    try:
        (table,) = read_state(_MEMORY, handle, _UID)
    except CorruptionError:
        return "damaged"
    return table.rows.to_pylist()


def _footer_or_error(path: str, size_bytes: int) -> object:
    try:
        return read_footer(_MEMORY, path, size_bytes)
    except (CorruptionError, CodecError):
        return "damaged"

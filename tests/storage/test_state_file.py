"""State files give back what was stored, cut at any key groups, and no more of them is read than that."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np
import pyarrow as pa
import pytest
from frozen_tables import tables_of
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_strategies import MAX_PARALLELISM, FrozenChunks, frozen_states, operator_states, same_tables

from tidegate.storage.checkpoints.metadata import SectionRef, StateHandle, StateKind
from tidegate.storage.errors import CorruptionError
from tidegate.storage.files.file_system_store import FileSystemStore, open_store
from tidegate.storage.files.store import Store, WrappedStore
from tidegate.storage.ids import OperatorUid
from tidegate.storage.state import state_file
from tidegate.storage.state.snapshot import FrozenState, StateChunk, StateTable
from tidegate.storage.state.state_file import (
    Compression,
    iter_state,
    read_directory,
    read_state,
    verify_state,
    write_state,
)

_UID = OperatorUid("counts")
_MEMORY = open_store("memory://state-file-tests")
_PATH = "job/chk-1/v-0"


def keyed(*sizes: Sequence[int], name: str = "n", first: int = 0) -> FrozenChunks:
    """Keyed state of one chunk for each list of sizes of consecutive key groups; the rows are numbered."""
    chunks = []
    row = 0
    for of_chunk in sizes:
        sums = tuple(accumulate(of_chunk, initial=0))
        chunks.append(StateChunk(pa.record_batch({"k": pa.array(range(row, row + sums[-1]), pa.int64())}), first, sums))
        first, row = first + len(of_chunk), row + sums[-1]
    return FrozenChunks(name, StateKind.KEYED, tuple(chunks))


def written(
    states: Sequence[tuple[OperatorUid, FrozenState]],
    *,
    inline: bool = False,
    compression: Compression | None = None,
    store: FileSystemStore = _MEMORY,
) -> StateHandle:
    """The handle of states that have rows."""
    handle = write_state(store, _PATH, states, inline_bytes_max=2**30 if inline else 0, compression=compression)
    assert handle is not None
    return handle


@given(
    states=operator_states(),
    inline=st.booleans(),
    compression=st.sampled_from([None, "lz4", "zstd"]),
    layer=st.integers(0, 3),
)
@settings(max_examples=40)
def test_states_come_back(
    states: list[tuple[OperatorUid, FrozenChunks]], inline: bool, compression: Compression | None, layer: int
) -> None:
    """Every operator reads its own rows, in order, from a file as from inlined bytes; what is stored verifies."""
    expected = [(uid, table) for uid, frozen in states for table in tables_of(frozen, layer)]
    handle = write_state(_MEMORY, _PATH, states, inline_bytes_max=2**30 if inline else 0, compression=compression)

    if handle is None:
        assert expected == []
        return
    verify_state(_MEMORY, handle)
    for uid in {uid for uid, _ in states}:
        stored = [table for owner, table in expected if owner == uid]
        found = read_state(_MEMORY, handle, uid, layer=layer)
        assert len(stored) == len(found)
        assert all(map(same_tables, stored, found))
        assert sum(table.rows.num_rows for table in stored) == sum(s.rows for s in handle.sections if s.uid == uid)
    assert read_state(_MEMORY, handle, OperatorUid("nobody")) == []


@dataclass(frozen=True)
class _Blocks:
    """A keyed state, and how many of its chunks were alive each time when the next one was asked for."""

    alive: list[int] = field(default_factory=list)
    state: str = "n"
    kind: StateKind = StateKind.KEYED
    removed: bool = False

    def chunks(self) -> Iterator[StateChunk]:
        """Ten chunks with memory of their own."""
        given: list[weakref.ref[pa.RecordBatch]] = []
        for _ in range(10):
            self.alive.append(sum(of() is not None for of in given))
            rows = pa.record_batch({f"v{number}": np.zeros(10_000) for number in range(4)})
            given.append(weakref.ref(rows))
            yield StateChunk(rows, 0, (0, len(rows)))
            del rows


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_chunk_is_let_go_of_before_the_next_one_is_made(compression: Compression | None) -> None:
    """However large a state is, one chunk of it at a time takes memory on its way into a file."""
    blocks = _Blocks()
    written([(_UID, blocks)], compression=compression)
    assert blocks.alive == [0] * 10


@given(states=st.lists(frozen_states([StateKind.KEYED]), min_size=1, max_size=3), data=st.data())
@settings(max_examples=40)
def test_any_cut_gives_every_row_once(states: list[FrozenChunks], data: st.DataObject) -> None:
    """Ranges that partition the key groups return, chunk by chunk and in order, just the rows of their groups."""
    handle = write_state(_MEMORY, _PATH, [(_UID, frozen) for frozen in states], inline_bytes_max=0)
    cuts = data.draw(st.lists(st.integers(0, MAX_PARALLELISM), max_size=4).map(sorted))

    for start, stop in pairwise([0, *cuts, MAX_PARALLELISM]):
        expected = [
            (frozen.state, frozen.removed, rows)
            for frozen in states
            for chunk in frozen.given
            if (rows := _rows_of_groups(chunk, start, stop)).num_rows
        ]
        found = [] if handle is None else read_state(_MEMORY, handle, _UID, range(start, stop))
        assert [(state, removed) for state, removed, _ in expected] == [(t.state, t.removed) for t in found]
        assert all(rows.equals(table.rows) for (_, _, rows), table in zip(expected, found, strict=True))


def _rows_of_groups(chunk: StateChunk, start: int, stop: int) -> pa.RecordBatch:
    """By the group of each row: another way than the reader's."""
    groups = np.repeat(np.arange(len(chunk.group_rows) - 1) + chunk.first_group, np.diff(chunk.group_rows))
    return chunk.rows.filter(pa.array((groups >= start) & (groups < stop)))


@pytest.mark.parametrize("kind", [StateKind.LIST, StateKind.UNION, StateKind.BROADCAST])
def test_only_keyed_state_is_cut(kind: StateKind) -> None:
    """State without keys comes whole, whatever key groups are asked for."""
    frozen = FrozenChunks("s", kind, (StateChunk(pa.record_batch({"x": [1, 2]})),))

    (found,) = read_state(_MEMORY, written([(_UID, frozen)]), _UID, range(1))

    assert same_tables(found, tables_of(frozen)[0])


@pytest.mark.parametrize(
    "states", [[], [(_UID, keyed([0, 0]))], [(_UID, keyed())]], ids=["none", "no rows", "no chunk"]
)
def test_no_rows_make_no_handle(states: list[tuple[OperatorUid, FrozenChunks]]) -> None:
    """A subtask without state stores nothing."""
    assert write_state(_MEMORY, "job/chk-1/none-0", states, inline_bytes_max=0) is None
    assert not _MEMORY.exists("job/chk-1/none-0")


def test_small_state_is_inlined_up_to_the_limit(memory_store: FileSystemStore) -> None:
    """State of exactly the limit is inlined and leaves no file; one byte more is written."""
    states = [(_UID, keyed([1, 1]))]
    size_bytes = written(states, inline=True).size_bytes

    inlined = write_state(memory_store, "p/v-0", states, inline_bytes_max=size_bytes)
    assert inlined is not None
    assert (inlined.path, len(inlined.inline or b"")) == (None, size_bytes)
    assert not memory_store.exists("p/v-0")

    in_file = write_state(memory_store, "p/v-0", states, inline_bytes_max=size_bytes - 1)
    assert in_file is not None
    assert (in_file.path, in_file.inline) == ("p/v-0", None)
    assert memory_store.read("p/v-0") == inlined.inline


def test_equal_state_makes_equal_bytes() -> None:
    """The format has no clock and no chance in it."""
    states = [(_UID, keyed([3, 0, 2], [1]))]

    assert written(states, inline=True) == written(states, inline=True)


def test_compressed_state_is_smaller() -> None:
    """Where its bytes repeat; and it is read without being told how it was compressed."""
    frozen = FrozenChunks("s", StateKind.LIST, (StateChunk(pa.record_batch({"x": [7] * 10_000})),))
    sizes = [written([(_UID, frozen)], compression=codec).size_bytes for codec in (None, "lz4", "zstd")]  # type: ignore[arg-type]

    assert max(sizes[1:]) < sizes[0] / 10


def test_rows_that_do_not_match_their_key_groups_are_not_written() -> None:
    """Prefix sums that do not fit the rows, or are those of state without keys, are refused before they are stored."""
    rows = pa.record_batch({"k": [1, 2]})
    chunks = [StateChunk(rows, 0, sums) for sums in ((0, 1, 3), (1, 2), (0, 2, 1, 2), (2,), ())]
    wrong = [FrozenChunks("n", StateKind.KEYED, (chunk,)) for chunk in chunks]
    wrong += [FrozenChunks("n", StateKind.KEYED, (StateChunk(rows, -1, (0, 2)),))]
    wrong += [FrozenChunks("n", StateKind.LIST, (StateChunk(rows, 0, (0, 2)),))]

    for frozen in wrong:
        with pytest.raises(CorruptionError, match="do not add up to 2 rows"):
            written([(_UID, frozen)])


# --- streaming --------------------------------------------------------------------------------------------------------


@dataclass
class _Streamed:
    """A `FrozenState` that tells when its chunks are taken and when it is let go."""

    told: list[object]
    chunks_max: int = 3
    fails: bool = False
    state: str = "s"
    kind: StateKind = StateKind.LIST
    removed: bool = False

    def chunks(self) -> Iterator[StateChunk]:
        """Numbered; `fails` at the end."""
        try:
            for number in range(self.chunks_max):
                self.told.append(number)
                yield StateChunk(pa.record_batch({"x": [number]}))
            if self.fails:
                raise CorruptionError("the state cannot be read")
        finally:
            self.told.append("let go")


class _Watched(FileSystemStore):
    """Tells how many bytes of a file have arrived when."""

    def __init__(self, told: list[object]) -> None:
        super().__init__("memory://watched-state-file-tests")
        self._told = told

    def write(self, path: str, chunks: object) -> int:
        """Count what comes."""

        def counted() -> Iterator[bytes]:
            for chunk in chunks:  # type: ignore[attr-defined]
                if len(chunk) > 64 and self._told[-1:] != ["written"]:
                    self._told.append("written")
                yield chunk

        return super().write(path, counted())


def test_state_is_encoded_while_it_is_written() -> None:
    """A chunk is produced when the one before it has left: memory does not grow with the state."""
    told: list[object] = []

    written([(_UID, _Streamed(told))], store=_Watched(told))

    assert told == [0, "written", 1, "written", 2, "written", "let go", "written"]


def test_a_state_that_fails_leaves_no_file_and_nothing_open() -> None:
    """The states are let go of, whether they fail themselves or the store does."""
    told: list[object] = []
    store = _Watched([])
    store.delete(_PATH)
    with pytest.raises(CorruptionError, match="the state cannot be read"):
        written([(_UID, _Streamed(told, fails=True))], store=store)
    assert told == [0, 1, 2, "let go"]
    assert not store.exists(_PATH)

    class Full(FileSystemStore):
        def write(self, path: str, chunks: object) -> int:
            next(iter(chunks))  # type: ignore[call-overload]
            raise CorruptionError("full")

    told.clear()
    with pytest.raises(CorruptionError, match="full"):
        written([(_UID, _Streamed(told))], store=Full("memory://full-state-file-tests"))
    assert told == [0, "let go"]


# --- what is read -----------------------------------------------------------------------------------------------------


class _CountingStore(WrappedStore):
    """Notes the ranges that are read from a store."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.ranges: list[tuple[int, int]] = []

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Note the range, then read it."""
        assert length is not None, "a whole file was read"
        self.ranges.append((offset, length))
        return super().read(path, offset, length)


def read_counted(
    handle: StateHandle, key_groups: range | None = None, uid: OperatorUid = _UID, wanted: str | None = None
) -> tuple[list[int], list[tuple[int, int]]]:
    """The column `k` of what is read, and the ranges."""
    counting = _CountingStore(_MEMORY)

    def is_wanted(section: SectionRef) -> bool:
        return wanted in (None, section.state)

    tables = read_state(counting, handle, uid, key_groups, wanted=is_wanted)
    return [k for table in tables for k in table.rows.column("k").to_pylist()], counting.ranges


def test_two_halves_together_read_about_the_whole_file() -> None:
    """Each reads the directory and the chunks of its own key groups, with one read."""
    handle = written([(_UID, keyed(*[[1000, 1000]] * 8))])

    first, ranges = read_counted(handle, range(8))
    second, more = read_counted(handle, range(8, 16))

    assert [*first, *second] == list(range(16_000))
    assert (len(ranges), len(more)) == (2, 2)
    total_bytes = sum(length for _, length in (*ranges, *more))
    assert handle.size_bytes - 64 * 4 <= total_bytes <= handle.size_bytes + handle.directory_bytes
    assert 0 < handle.directory_bytes < handle.size_bytes / 10


@pytest.mark.parametrize("read", [read_state, lambda *of, **how: list(iter_state(*of, **how))])
def test_several_threads_read_the_same(monkeypatch: pytest.MonkeyPatch, read: Callable[..., list[StateTable]]) -> None:
    """What they read comes in the order of the file, and damage to one piece is told as by one thread."""
    monkeypatch.setattr(state_file, "READ_BYTES_MAX", 1)
    handle = written([(_UID, keyed(*[[1000, 1000]] * 8))])
    assert handle.path is not None

    tables = read(_MEMORY, handle, _UID, readers=4)

    assert list(range(16_000)) == [k for table in tables for k in table.rows.column("k").to_pylist()]
    data = bytearray(_MEMORY.read(handle.path))
    data[handle.size_bytes // 2] ^= 1
    _MEMORY.write(handle.path, [data])
    with pytest.raises(CorruptionError, match="its checksum does not match"):
        read(_MEMORY, handle, _UID, readers=4)


def test_a_chunk_at_the_edge_is_read_by_both_and_cut() -> None:
    """No row is lost or comes twice where a range ends within a chunk."""
    handle = written([(_UID, keyed([2, 2, 2], [2, 2], first=3))])

    assert (lambda found: (found[0], len(found[1])))(read_counted(handle, range(4))) == ([0, 1], 2)
    assert list(range(2, 10)) == read_counted(handle, range(4, 100))[0]
    assert read_counted(handle, range(3))[0] == []


def test_no_more_is_read_than_the_sections_that_are_wanted() -> None:
    """Of a file with several states one reads the chunks of one's own; without any not even the directory."""
    other = OperatorUid("big")
    handle = written([(other, keyed([500, 500])), (_UID, keyed([3, 0])), (_UID, keyed([0, 3], name="m"))])
    directory = (handle.size_bytes - handle.directory_bytes, handle.directory_bytes)
    section = handle.sections[2]

    assert ([0, 1, 2], [directory, (section.offset, section.length_bytes)]) == read_counted(handle, range(1, 2))
    assert ([0, 1, 2], [directory, (section.offset, section.length_bytes)]) == read_counted(handle, wanted="m")
    assert read_counted(handle, uid=OperatorUid("nobody")) == ([], [])
    assert read_counted(handle, wanted="nothing") == ([], [])


def test_a_read_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours are fetched together only up to a limit; a chunk beyond it comes alone."""
    handle = written([(_UID, keyed([1], [1], [1000], [1], [1]))])
    (stored,) = read_directory(_MEMORY, handle)
    sizes = [chunk.length_bytes for chunk in stored.chunks]
    monkeypatch.setattr(state_file, "READ_BYTES_MAX", 2 * sizes[0] + 64)

    found, ranges = read_counted(handle)

    assert found == list(range(1004))
    lengths = [length for _, length in ranges[1:]]
    assert len(lengths) == 3
    assert lengths[1] == sizes[2]
    assert max(lengths[0], lengths[2]) <= state_file.READ_BYTES_MAX


def test_chunks_start_at_multiples_of_64_bytes() -> None:
    """So that kernels use inlined bytes, and files that are mapped, in place."""
    handle = written([(_UID, keyed([1], [2], [3])), (OperatorUid("b"), keyed([5]))])

    assert all(chunk.offset % 64 == 0 for stored in read_directory(_MEMORY, handle) for chunk in stored.chunks)

"""No damage to a state file goes unnoticed, and none is taken for state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_strategies import FrozenChunks, operator_states

from tidegate.storage.checkpoints.metadata import NativeFile, StateHandle, StateKind
from tidegate.storage.errors import CodecError, CorruptionError, NotFoundError
from tidegate.storage.files.envelope import checksum_of
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.ids import OperatorUid
from tidegate.storage.state.snapshot import StateChunk
from tidegate.storage.state.state_file import (
    decode_chunk,
    encode_chunk,
    read_footer,
    read_state,
    verified_native,
    verify_native,
    verify_state,
    write_state,
)

_UID = OperatorUid("counts")
_MEMORY = open_store("memory://state-damage-tests")
_ROWS = pa.record_batch({"k": [1, 2, 3], "v": ["a", "b", None]})
_STATE = FrozenChunks(
    "n", StateKind.KEYED, (StateChunk(_ROWS.slice(0, 2), 1, (0, 2)), StateChunk(_ROWS.slice(2), 2, (0, 0, 1)))
)


def written(path: str = "job/chk-1/v-0", *, inline: bool = False) -> StateHandle:
    """A handle of `_STATE`."""
    handle = write_state(_MEMORY, path, [(_UID, _STATE)], inline_bytes_max=2**30 if inline else 0)
    assert handle is not None
    return handle


def outcome(read: Callable[[], object]) -> object:
    """What is read, or that it is damaged."""
    try:
        return read()
    except (CorruptionError, CodecError):
        return "damaged"


def rows_of(handle: StateHandle) -> object:
    """All rows."""
    tables = read_state(_MEMORY, handle, _UID)
    return [row for table in tables for row in table.rows.to_pylist()]


def test_a_file_tells_what_is_in_it() -> None:
    """The footer gives the handle's sections, from the end of the file alone and from the whole of it."""
    handle = written()
    assert handle.path is not None

    assert read_footer(_MEMORY, handle.path, handle.size_bytes) == handle.sections
    assert read_footer(_MEMORY, handle.path) == handle.sections


@pytest.mark.slow
def test_every_flipped_bit_is_found() -> None:
    """Whichever bit of inlined state or of a file is flipped, verification finds it; no reader returns other rows."""
    handle = written(inline=True)
    path_handle = replace(handle, path="flipped", inline=None)
    assert handle.inline is not None

    for position in range(handle.size_bytes):
        damaged = bytearray(handle.inline)
        damaged[position] ^= 1 << position % 8
        _MEMORY.write("flipped", [damaged])
        for broken in (replace(handle, inline=bytes(damaged)), path_handle):
            with pytest.raises(CorruptionError):
                verify_state(_MEMORY, broken)
            assert outcome(lambda broken=broken: rows_of(broken)) in (_ROWS.to_pylist(), "damaged")  # type: ignore[misc]
        with pytest.raises(CorruptionError):
            read_footer(_MEMORY, "flipped")
        assert outcome(lambda: read_footer(_MEMORY, "flipped", handle.size_bytes)) in (handle.sections, "damaged")


@given(states=operator_states(), inline=st.booleans(), data=st.data())
@settings(max_examples=40)
def test_any_damage_is_found(states: list[tuple[OperatorUid, FrozenChunks]], inline: bool, data: st.DataObject) -> None:
    """A flipped bit, a lost end and added bytes at any place of any state are CorruptionError, or do not matter."""
    handle = write_state(_MEMORY, "job/chk-1/v-0", states, inline_bytes_max=2**30 if inline else 0)
    if handle is None:
        return
    uids = sorted({uid for uid, _ in states})
    before = [read_state(_MEMORY, handle, uid) for uid in uids]
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
    for uid, tables in zip(uids, before, strict=True):
        found = outcome(lambda uid=uid: read_state(_MEMORY, damaged, uid))  # type: ignore[misc]
        assert found in (tables, "damaged")


def test_what_the_metadata_does_not_say_is_not_read() -> None:
    """A whole file of other states, or with another directory, is not the one that the checkpoint wrote."""
    handle = written()
    (section,) = handle.sections

    for wrong in (
        replace(handle, sections=(replace(section, rows=4),)),
        replace(handle, directory_bytes=handle.directory_bytes - 1),
        replace(handle, directory_bytes=0),
        replace(handle, directory_bytes=handle.size_bytes + 1),
    ):
        for read in (lambda wrong=wrong: rows_of(wrong), lambda wrong=wrong: verify_state(_MEMORY, wrong)):  # type: ignore[misc]
            with pytest.raises(CorruptionError):
                read()


def test_a_lost_file_is_not_found() -> None:
    """A file that is gone is NotFoundError, for reading as for verifying."""
    handle = replace(written(), path="gone")

    for read in (lambda: verify_state(_MEMORY, handle), lambda: rows_of(handle)):
        with pytest.raises(NotFoundError, match="gone"):
            read()


@pytest.mark.parametrize("version", [99, 1])
def test_a_file_of_another_version_is_named_as_such(version: int) -> None:
    """An intact file of a later format, or of an older one, is not called damaged."""
    handle = written()
    other = bytearray(_MEMORY.read(handle.path or ""))
    other[8] = version
    _MEMORY.write("other", [other])

    with pytest.raises(CodecError, match=f"has format version {version}, and"):
        read_footer(_MEMORY, "other", handle.size_bytes)


def test_rows_of_a_newer_serializer_are_refused() -> None:
    """What their types mean is not known; and a stream that tidegate did not write is no state."""
    data = b"".join(encode_chunk(_ROWS))
    stamp = b"arrow/1"
    assert data.count(stamp) == 1

    assert decode_chunk(data, "here").equals(_ROWS)
    with pytest.raises(CodecError, match=r"here was written with version 2 of the serializer; .* reads up to 1"):
        decode_chunk(data.replace(stamp, b"arrow/2"), "here")
    with pytest.raises(CorruptionError, match="was not written by tidegate: its serializer is b'other/1'"):
        decode_chunk(data.replace(stamp, b"other/1"), "here")


def test_a_chunk_is_an_arrow_stream() -> None:
    """Byte for byte what Arrow's own writer makes of the rows, whatever their types, and of a slice of them."""
    columns = {
        "int": pa.array([1, None, 3]),
        "text": pa.array(["a", None, "ccc"]),
        "flag": pa.array([True, None, False]),
        "list": pa.array([[1], None, [2, 3]]),
        "map": pa.array([[("a", 1)], None, []], pa.map_(pa.string(), pa.int64())),
        "of dictionary": pa.array(
            [{"x": "b"}, None, {"x": "a"}], pa.struct([("x", pa.dictionary(pa.int8(), pa.string()))])
        ),
        "null": pa.nulls(3),
    }
    for rows in (pa.record_batch({name: array}).slice(start) for name, array in columns.items() for start in (0, 1)):
        data = b"".join(encode_chunk(rows))
        assert decode_chunk(data, "here").equals(rows)
        with pa.ipc.open_stream(data) as reader:
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, reader.schema) as writer:
                writer.write_batch(rows.replace_schema_metadata(reader.schema.metadata))
        assert data == sink.getvalue().to_pybytes()


def test_metadata_of_a_schema_comes_back() -> None:
    """The user's own is kept, and the serializer's mark is not seen."""
    rows = _ROWS.replace_schema_metadata({"mine": "1"})

    assert decode_chunk(b"".join(encode_chunk(rows)), "here").schema.equals(rows.schema, check_metadata=True)
    assert decode_chunk(b"".join(encode_chunk(_ROWS)), "here").schema.metadata is None


def test_damage_to_a_file_of_a_backend_is_found() -> None:
    """Flipped, cut, grown or gone; and what is whole is given back byte by byte."""
    content = bytes(range(200))
    _MEMORY.write("native", [content])
    file = NativeFile("000001.sst", "native", len(content), checksum_of(content))
    assert content == b"".join(verified_native(_MEMORY, file))
    verify_native(_MEMORY, file)

    for damaged in (content[:-1], content + b"x", content[:100] + b"x" + content[101:]):
        _MEMORY.write("native", [damaged])
        with pytest.raises(CorruptionError, match="native is damaged"):
            verify_native(_MEMORY, file)
    with pytest.raises(NotFoundError):
        verify_native(_MEMORY, replace(file, path="gone"))

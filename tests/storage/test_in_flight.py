"""In-flight elements come back as they were stored, or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.errors import CorruptionError
from tidegate.storage.files.file_system_store import FileSystemStore, open_store
from tidegate.storage.ids import SubtaskIndex
from tidegate.storage.state.in_flight import (
    ChannelEnd,
    InFlightRows,
    edges_in_flight,
    in_flight_section,
    parse_in_flight_section,
    read_in_flight,
    write_in_flight,
)
from tidegate.storage.state.state_file import verify_state

PATH = "demo-1/chk-3/count-0-channels"
EDGE = "source->count#0"


def rows(*values: int | None) -> pa.RecordBatch:
    """A batch of one column; of type null if it has nothing else."""
    data_type = pa.null() if set(values) == {None} else pa.int64()
    return pa.record_batch({"x": pa.array(values, data_type)})


def end(direction: str, upstream: int, downstream: int, edge: str = EDGE) -> ChannelEnd:
    """One end of a channel."""
    assert direction in ("input", "output")
    return ChannelEnd(edge, direction, SubtaskIndex(upstream), SubtaskIndex(downstream))  # type: ignore[arg-type]


def values(held: InFlightRows) -> list[int | None]:
    """All values, in order."""
    return [value for batch in held.batches for value in batch["x"].to_pylist()]


@pytest.fixture
def folder() -> Iterator[FileSystemStore]:
    """A store in memory."""
    store = open_store("memory://in-flight")
    yield store
    store.delete_tree("")


@given(elements=st.lists(st.integers(-5, 3), max_size=12), inline_bytes_max=st.sampled_from([0, 100_000]))
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_watermarks_come_back_between_the_rows(
    folder: FileSystemStore, elements: list[int], inline_bytes_max: int
) -> None:
    """Each in its place, wherever batches were joined; they cut no chunk. Without rows nothing is stored."""
    held = [rows(*range(size)) if size > 0 else size for size in elements]
    other = InFlightRows(end("input", 7, 0), (rows(1, 2),))

    handle = write_in_flight(
        folder, PATH, [InFlightRows.of(end("input", 1, 0), held), other], inline_bytes_max=inline_bytes_max
    )

    assert handle is not None
    verify_state(folder, handle)
    *found, last = read_in_flight(folder, handle, EDGE)
    assert [*last.elements()] == [*other.batches]
    sent = [x for e in held for x in ([e] if isinstance(e, int) else [("row", x) for x in e["x"].to_pylist()])]
    if not any(not isinstance(e, int) for e in held):
        assert found == []
        return
    (item,) = found
    assert sent == [
        x for e in item.elements() for x in ([e] if isinstance(e, int) else [("row", x) for x in e["x"].to_pylist()])
    ]
    assert len(item.batches) == 1
    assert len(handle.sections) == 2 + any(isinstance(e, int) for e in held)


@pytest.mark.parametrize("inline_bytes_max", [0, 100_000])
def test_what_was_in_flight_comes_back(folder: FileSystemStore, inline_bytes_max: int) -> None:
    """By edge and end, in order, joined to one batch; from a file, or from the handle where it is small."""
    held = [
        InFlightRows(end("input", 1, 0), (rows(1, 2), rows(3))),
        InFlightRows(end("input", 2, 0), (rows(7),)),
        InFlightRows(end("output", 0, 5, "count->sink#1"), (rows(8), rows(None, 9))),
    ]

    handle = write_in_flight(folder, PATH, held, inline_bytes_max=inline_bytes_max)

    assert handle is not None
    assert (handle.path is None) == bool(inline_bytes_max)
    verify_state(folder, handle)
    assert edges_in_flight(handle) == {EDGE, "count->sink#1"}
    found = read_in_flight(folder, handle, EDGE)
    assert [(item.end, values(item), len(item.batches)) for item in found] == [
        (end("input", 1, 0), [1, 2, 3], 1),
        (end("input", 2, 0), [7], 1),
    ]
    (other,) = read_in_flight(folder, handle, "count->sink#1")
    assert (other.end, values(other)) == (end("output", 0, 5, "count->sink#1"), [8, None, 9])
    assert read_in_flight(folder, handle, "count->sink#0") == []


def test_only_wanted_ends_are_read(folder: FileSystemStore) -> None:
    """Damage in a part that nobody wants does not matter; the part that is wanted is verified."""
    handle = write_in_flight(
        folder,
        PATH,
        [InFlightRows(end("input", up, 0), (rows(*range(100)),)) for up in range(2)],
        inline_bytes_max=0,
    )
    assert handle is not None
    damaged = bytearray(folder.read(PATH))
    damaged[handle.sections[1].offset + handle.sections[1].length_bytes // 2] ^= 1
    folder.write(PATH, [damaged])

    (found,) = read_in_flight(folder, handle, EDGE, lambda e: e.upstream == 0)

    assert values(found) == list(range(100))
    with pytest.raises(CorruptionError, match="input:1>0"):
        read_in_flight(folder, handle, EDGE, lambda e: e.upstream == 1)


def test_nothing_in_flight_is_no_file(folder: FileSystemStore) -> None:
    """There is no handle then, and nothing was written."""
    assert write_in_flight(folder, PATH, [], inline_bytes_max=0) is None
    assert not folder.exists(PATH)


def test_a_schema_that_changes_in_a_channel_is_kept(folder: FileSystemStore) -> None:
    """A column that was all null becomes a number: each batch keeps the type it had, and the order is kept."""
    held = InFlightRows(end("input", 0, 0), (rows(None), rows(None), rows(1), rows(None)))

    handle = write_in_flight(folder, PATH, [held], inline_bytes_max=0)

    assert handle is not None
    (found,) = read_in_flight(folder, handle, EDGE)
    assert [(str(b.schema.field("x").type), b["x"].to_pylist()) for b in found.batches] == [
        ("null", [None, None]),
        ("int64", [1]),
        ("null", [None]),
    ]


def test_batches_that_cannot_be_joined_are_kept(folder: FileSystemStore) -> None:
    """Two dictionaries with small indexes may have too many values for one: no reason for the task to fail."""
    words = [[f"{letter}{n}" for n in range(100)] for letter in "ab"]
    small = pa.dictionary(pa.int8(), pa.string())
    batches = tuple(pa.record_batch({"x": pa.array(part).dictionary_encode().cast(small)}) for part in words)

    handle = write_in_flight(folder, PATH, [InFlightRows(end("input", 0, 0), batches)])

    assert handle is not None
    (held,) = read_in_flight(folder, handle, EDGE)
    assert words[0] + words[1] == [value for batch in held.batches for value in batch["x"].to_pylist()]


@given(data=st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_torn_or_flipped_files_are_refused(folder: FileSystemStore, data: st.DataObject) -> None:
    """Any bit that flips and any end that is missing is found by verifying; reading never gives other rows."""
    sent = [list(range(50)), list(range(50, 60))]
    held = [InFlightRows(end("input", up, 0), (rows(*sent[up]),)) for up in range(2)]
    handle = write_in_flight(folder, PATH, held, inline_bytes_max=0)
    assert handle is not None
    content = bytearray(folder.read(PATH))
    if data.draw(st.booleans(), label="torn"):
        del content[data.draw(st.integers(0, len(content) - 1), label="length") :]
    else:
        content[data.draw(st.integers(0, len(content) - 1), label="byte")] ^= 1 << data.draw(st.integers(0, 7))
    folder.write(PATH, [content])

    with pytest.raises(CorruptionError):
        verify_state(folder, handle)
    try:
        found = read_in_flight(folder, handle, EDGE)
    except CorruptionError:
        return
    assert [values(item) for item in found] == sent


@pytest.mark.parametrize(
    "state",
    [
        "",
        "input:1",
        "input:1>x",
        "input:1>2 watermark",
        "watermarks",
        "inputs:1>2",
        "input:1>2 ",
        "input:-1>2",
        "splits",
    ],
)
def test_other_sections_are_no_channels(folder: FileSystemStore, state: str) -> None:
    """What is not spelled as an end of a channel is damage, never guessed at."""
    handle = write_in_flight(folder, PATH, [InFlightRows(end("input", 0, 0), (rows(1),))])
    assert handle is not None
    section = handle.sections[0]
    assert parse_in_flight_section(section) == end("input", 0, 0)
    assert in_flight_section(end("input", 0, 0)) == section.state

    with pytest.raises(CorruptionError, match="no in-flight elements"):
        parse_in_flight_section(replace(section, state=state))
    with pytest.raises(CorruptionError, match="no in-flight elements"):
        parse_in_flight_section(replace(section, kind=StateKind.UNION))

"""Writes and reads in-flight elements: rows in the channels of one subtask that an unaligned barrier has overtaken.

They are stored in a state file, with the checksums, inlining and verification of `state_file.py`. Rules:

- The uid of a section is the name of an edge. Its state names the channel of the edge and the side (sender or receiver)
  that buffered the rows. Its kind is LIST. Names of edges survive changes of the job graph; numbers of edges do not.
- Batches of one channel end are joined to one chunk. A new chunk begins where the schema changes between two batches (a
  column was all null up to then), and for each batch where Arrow cannot join them.
- The watermarks between the rows of a channel end are a separate section after the rows (`stored_rows.py`). The section
  is missing if there are no watermarks.
- A subtask stores what it received (`input`) and what it had not sent (`output`), of its own channels only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import pyarrow as pa

from tidegate.storage.checkpoints.metadata import SectionRef, StateHandle, StateKind
from tidegate.storage.errors import CorruptionError
from tidegate.storage.files.store import Store
from tidegate.storage.ids import OperatorUid, SubtaskIndex
from tidegate.storage.state.snapshot import StateChunk
from tidegate.storage.state.state_file import INLINE_BYTES_MAX, read_state, write_state
from tidegate.storage.state.stored_rows import Mark, marks_as_rows, marks_of, with_watermarks, without_watermarks

_WATERMARKS = " watermarks"
_SECTION = re.compile(rf"(input|output):(\d+)>(\d+)(?:{_WATERMARKS})?", re.ASCII)


@dataclass(frozen=True, slots=True)
class ChannelEnd:
    """One end of a channel: the input of the receiver (`input`) or the output of the sender (`output`)."""

    edge: str
    direction: Literal["input", "output"]
    upstream: SubtaskIndex
    downstream: SubtaskIndex


@dataclass(frozen=True, slots=True)
class InFlightRows:
    """Rows that one end of a channel had buffered, oldest first, and the watermarks between them (in ms)."""

    end: ChannelEnd
    batches: tuple[pa.RecordBatch, ...]
    watermarks: tuple[Mark, ...] = ()

    @classmethod
    def of(cls, end: ChannelEnd, elements: Iterable[pa.RecordBatch | int]) -> InFlightRows:
        """Builds the rows of a channel end from record batches and watermarks (in ms), in the order of the channel."""
        batches, watermarks = without_watermarks(elements)
        return cls(end, tuple(batches), tuple(watermarks))

    def elements(self) -> Iterator[pa.RecordBatch | int]:
        """Yields the record batches and watermarks (in ms) in the order of the channel.

        A batch is cut at a watermark in it.
        """
        return with_watermarks(self.batches, self.watermarks)


def in_flight_section(end: ChannelEnd) -> str:
    """Returns the name of the section that stores a channel end of an edge: `input:0>3`."""
    return f"{end.direction}:{end.upstream}>{end.downstream}"


def parse_in_flight_section(section: SectionRef) -> ChannelEnd:
    """Returns the channel end whose rows or watermarks a section stores. Raises CorruptionError for other sections."""
    match = _SECTION.fullmatch(section.state)
    if match is None or section.kind is not StateKind.LIST:
        raise CorruptionError(
            f"{section.state!r} of {section.uid!r} holds no in-flight elements of a channel; choose another checkpoint"
        )
    direction: Literal["input", "output"] = "input" if match[1] == "input" else "output"
    return ChannelEnd(section.uid, direction, SubtaskIndex(int(match[2])), SubtaskIndex(int(match[3])))


def write_in_flight(
    store: Store, path: str, rows: Sequence[InFlightRows], *, inline_bytes_max: int = INLINE_BYTES_MAX
) -> StateHandle | None:
    """Stores the in-flight rows of a subtask's channels.

    Returns None if the channels were empty. Raises StorageError.
    """
    states = [(OperatorUid(held.end.edge), section) for held in rows for section in _sections(held)]
    return write_state(store, path, states, inline_bytes_max=inline_bytes_max)


def read_in_flight(
    store: Store, handle: StateHandle, edge: str, wanted: Callable[[ChannelEnd], bool] = lambda _: True
) -> list[InFlightRows]:
    """Returns the verified in-flight rows of one edge, for the channel ends that `wanted` selects.

    Raises CorruptionError, NotFoundError.
    """
    ends = {section.state: parse_in_flight_section(section) for section in handle.sections if section.uid == edge}
    chosen = {state for state, end in ends.items() if wanted(end)}
    found: dict[ChannelEnd, list[pa.RecordBatch]] = {}
    watermarks: dict[ChannelEnd, list[Mark]] = {}
    for table in read_state(store, handle, OperatorUid(edge), wanted=lambda section: section.state in chosen):
        end = ends[table.state]
        if table.state.endswith(_WATERMARKS):
            watermarks.setdefault(end, []).extend(marks_of(table.rows))
        else:
            found.setdefault(end, []).append(table.rows)
    return [InFlightRows(end, tuple(batches), tuple(watermarks.get(end, ()))) for end, batches in found.items()]


def edges_in_flight(handle: StateHandle) -> frozenset[str]:
    """Returns the names of the edges that have in-flight rows in a state handle."""
    return frozenset(str(section.uid) for section in handle.sections)


def _sections(held: InFlightRows) -> Iterator[_Held]:
    state = in_flight_section(held.end)
    yield _Held(state, held.batches)
    if held.batches and held.watermarks:
        yield _Held(state + _WATERMARKS, [marks_as_rows(held.watermarks)])


@dataclass(frozen=True, slots=True)
class _Held:
    """The rows, or the watermarks, of one channel end, in the form of a snapshot (`FrozenState`)."""

    state: str
    batches: Sequence[pa.RecordBatch]
    kind: StateKind = StateKind.LIST
    removed: bool = False

    def chunks(self) -> Iterator[StateChunk]:
        return map(StateChunk, _joined(self.batches))


def _joined(batches: Sequence[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for _, alike in groupby(batches, key=lambda batch: batch.schema):
        run = list(alike)
        try:
            joined = [pa.concat_batches(run)]
        except pa.ArrowException:
            joined = run  # dictionaries whose values together need a larger index type, or more than 2 GB of strings
        yield from joined

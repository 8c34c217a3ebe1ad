"""Reads of a source beside its task: one reader, who closes it, and reads that wait for rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

import pytest
from batches import batch
from hosted_tasks import JOB, effects_of
from link import SCHEMA, SOURCE, work_graph

from tidegate.actors.drivers import source_reads
from tidegate.actors.drivers.source_reads import HeldSources
from tidegate.actors.drivers.task_effects import TaskEffects
from tidegate.actors.task import instructions as do
from tidegate.connectors.source import ReadResult, SourceSplit
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.tables.handed_rows import hold_path

_roots = count()
LONG_MS = 3_600_000
"""Longer than any test waits."""


class Reader:
    """Calls `during` in the middle of every read."""

    def __init__(self, log: list[str], during: Callable[[], None]) -> None:
        self.log = log
        self.during = during

    def read(self, split: SourceSplit, offset: int, rows_max: int) -> ReadResult:
        self.log.append("read")
        self.during()
        self.log.append("read ends")
        return ReadResult(batch(1), offset + 1, False)

    def close(self) -> None:
        self.log.append("close")


class ReaderSource:
    """A source with one split and a `Reader`."""

    schema = SCHEMA

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.during: Callable[[], None] = lambda: None

    def splits(self) -> Sequence[SourceSplit]:
        return [SourceSplit("one", b"")]

    def reader(self) -> Reader:
        self.log.append("open")
        return Reader(self.log, lambda: self.during())


def reading(*handed_on: str) -> tuple[TaskEffects, ReaderSource, list[str], do.ReadSource]:
    """A task that reads, with a log of what its reader was asked."""
    log: list[str] = []
    source = ReaderSource(log)
    graph = work_graph()
    vertex = graph.vertex(SOURCE)
    assert vertex.source is not None
    changed = replace(vertex, source=replace(vertex.source, source=source))
    graph = replace(graph, vertices=(changed, *graph.vertices[1:]))
    effects, _ = effects_of(graph, SOURCE, handed_on=handed_on)
    return effects, source, log, do.ReadSource(0, source.splits()[0], 0, 10)


def test_a_reader_is_made_once_and_closed_once() -> None:
    """One reader serves all reads of a task."""
    effects, _, log, read = reading()
    effects.read_source(read)
    effects.read_source(read)
    effects.close()
    effects.close()

    assert log == ["open", "read", "read ends", "read", "read ends", "close"]


def test_a_reader_is_not_closed_under_a_read() -> None:
    """A task that is closed while it reads closes the reader after the read; later reads do nothing."""
    effects, source, log, read = reading()
    source.during = effects.close

    effects.read_source(read)

    assert log == ["open", "read", "read ends", "close"]
    assert effects.read_source(read) is None
    assert log[-1] == "close"


def test_a_read_goes_on_while_splits_have_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stops at the first one that has something to tell, and when the task is closed."""
    effects, source, log, read = reading()
    told: dict[str, ReadResult] = {"b": ReadResult(None, 5, at_end=False, payload=b"new")}

    def answer(_: Reader, split: SourceSplit, offset: int, rows_max: int) -> ReadResult:
        log.append(split.split_id)
        source.during()
        return told.get(split.split_id, ReadResult(None, offset, at_end=False))

    monkeypatch.setattr(Reader, "read", answer)
    read = replace(read, others=tuple((SourceSplit(name, b""), 5) for name in "abc"))
    found = effects.read_source(read)
    assert found is not None
    assert (found.empty, found.next_offset, found.payload) == (2, 5, b"new")

    told.clear()
    found = effects.read_source(read)
    assert found is not None
    assert (found.empty, found.next_offset, found.batch) == (3, 5, None)

    source.during = effects.close
    effects.read_source(read)
    assert log == ["open", "one", "a", "b", "one", "a", "b", "c", "one", "close"]


def test_a_job_that_is_held_back_asks_no_source() -> None:
    """And the machine hears that it did not, which is another thing than that there are no rows."""
    url = f"memory://held-{next(_roots)}"
    open_store(url).create(hold_path(JOB), b"")
    effects, _, log, read = reading(url)
    found = effects.read_source(read)
    assert found is not None
    assert (found.batch, found.next_offset, found.at_end, found.held) == (None, 0, False, True)
    assert "read" not in log

    effects, _, log, read = reading()
    found = effects.read_source(read)
    assert found is not None
    assert not found.held


@pytest.fixture
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads that wait for rows try again at once."""
    monkeypatch.setattr(source_reads, "PAUSE_MAX_MS", 0)


def patient(
    monkeypatch: pytest.MonkeyPatch, rows_after: int
) -> tuple[TaskEffects, ReaderSource, list[str], do.ReadSource]:
    """A patient read of a split that has nothing the first few times."""
    effects, source, log, read = reading()

    def answer(_: Reader, split: SourceSplit, offset: int, rows_max: int) -> ReadResult:
        log.append("read")
        source.during()
        found = log.count("read") > rows_after
        return ReadResult(batch(1) if found else None, offset + found, at_end=False)

    monkeypatch.setattr(Reader, "read", answer)
    return effects, source, log, replace(read, patience_ms=LONG_MS)


@pytest.mark.usefixtures("without_pauses")
def test_a_patient_read_goes_on_until_there_are_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The task hears of them, and not of what was tried before. In virtual time nobody waits: it hears of nothing."""
    effects, _, log, read = patient(monkeypatch, rows_after=3)
    found = effects.read_source(read)
    assert found is not None
    assert (found.batch, found.next_offset) == (batch(1), 1)
    assert log == ["open", *["read"] * 4]

    effects, _, log, read = patient(monkeypatch, rows_after=3)
    found = effects.read_source(read, patient=False)
    assert found is not None
    assert (found.batch, found.next_offset) == (None, 0)
    assert log == ["open", "read"]


def test_a_patient_read_comes_back_when_the_task_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pause that it is in ends, however long it would be: so files are closed, and a process has its threads."""
    monkeypatch.setattr(source_reads, "PAUSE_MAX_MS", LONG_MS)
    effects, source, log, read = patient(monkeypatch, rows_after=LONG_MS)
    source.during = effects.hurry
    effects.read_source(read)
    assert log == ["open", "read"]
    effects.close()
    assert log == ["open", "read", "close"]


@pytest.mark.usefixtures("without_pauses")
def test_a_patient_read_comes_back_when_the_job_is_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each try looks: rows that come then are not read, and the machine hears why."""
    effects, _, log, read = patient(monkeypatch, rows_after=LONG_MS)
    monkeypatch.setattr(HeldSources, "wait", lambda _: log.count("read") >= 2)
    found = effects.read_source(read)
    assert found is not None
    assert (found.batch, found.held) == (None, True)
    assert log == ["open", "read", "read"]

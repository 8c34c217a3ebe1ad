"""Rows at a rate: none early, none left out, and each the same whenever it is read."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from source_contract import check_source, read_split, rows_of

from tidegate.connectors.rate_source import TICK_MS, RateSource
from tidegate.storage.errors import ConfigurationError

START_MS = 1_000_000 * TICK_MS


@dataclass
class Clock:
    """A clock that stands still unless a test moves it."""

    now_ms: int = START_MS

    def __call__(self) -> int:
        """The time."""
        return self.now_ms


def values(source: RateSource, clock: Clock) -> list[int]:
    """All values that are due."""
    rows = [row for s in source.splits() for row in rows_of(read_split(source, source.reader(), s, 7))]
    assert all(row["timestamp"].timestamp() * 1000 <= clock.now_ms for row in rows)  # type: ignore[attr-defined]
    return sorted(row["value"] for row in rows)  # type: ignore[type-var]


@pytest.mark.parametrize("rate", [None, 0.4, 7, 200, 1_900, 100_000])
def test_it_keeps_the_contract(rate: float | None) -> None:
    """Bounded, at the end of its time: every row once, in its place, whatever the size of reads."""
    clock = Clock()
    source = RateSource(rate, 100, 3, clock)
    start = source.splits()
    clock.now_ms += 10**6

    class Begun(RateSource):
        def splits(self) -> list:  # type: ignore[type-arg]
            return start

    rows = check_source(Begun(rate, 100, 3, clock))
    assert sorted(row["value"] for row in rows) == list(range(100))  # type: ignore[type-var]


@given(rate=st.floats(0.1, 5_000), ticks=st.integers(0, 300), splits=st.integers(1, 5))
@settings(max_examples=50)
def test_as_many_rows_as_are_due(rate: float, ticks: int, splits: int) -> None:
    """The rate, exactly, over all splits; the first row is due at once."""
    clock = Clock()
    source = RateSource(rate, None, splits, clock)
    begun = source.splits()
    clock.now_ms += ticks * TICK_MS
    reader = source.reader()
    rows = [row for split in begun for row in rows_of(read_split(source, reader, split, 10_000))]

    assert sorted(row["value"] for row in rows) == list(range(int(ticks * TICK_MS * rate / 1000) + 1))  # type: ignore[type-var]


def test_the_rows_of_a_step_are_one_batch_at_a_low_rate() -> None:
    """Not a batch for each split, of a row or none: batches cost the same however few rows they have."""
    clock = Clock()
    source = RateSource(200, None, 8, clock)
    begun, reader = source.splits(), source.reader()
    offsets = dict.fromkeys(begun, 0)
    for _ in range(20):
        clock.now_ms += TICK_MS
        found = []
        for split in begun:
            read = reader.read(split, offsets[split], 1_000)
            offsets[split] = read.next_offset
            found += [] if read.batch is None else [read.batch.num_rows]
        assert found == [4 + (clock.now_ms == START_MS + TICK_MS)] or found == [1, 4]


def test_what_is_overdue_comes_at_once_and_a_clock_that_goes_back_brings_nothing() -> None:
    """A restored job goes on where it was; rows have the timestamps that they would have had."""
    clock = Clock()
    source = RateSource(10, None, 1, clock)
    (split,) = source.splits()
    clock.now_ms += 300
    assert len(rows_of(read_split(source, source.reader(), split, 100))) == 4

    clock.now_ms -= 10_000
    assert rows_of(read_split(source, source.reader(), split, 100, offset=4)) == []
    clock.now_ms += 70_000
    later = rows_of(read_split(source, source.reader(), split, 100, offset=4))
    assert [row["value"] for row in later] == list(range(4, 604))
    assert later[0]["timestamp"].timestamp() * 1000 == START_MS + 400  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("rate", "rows", "splits", "named"),
    [(0, None, 1, "rows_per_second=0"), (1, -1, 1, "rows=-1"), (float("nan"), 1, 1, "nan"), (1, 1, 0, "splits=0")],
)
def test_wrong_settings_are_refused(rate: float, rows: int | None, splits: int, named: str) -> None:
    """With the name of the setting."""
    with pytest.raises(ConfigurationError, match=named):
        RateSource(rate, rows, splits)


def test_another_rate_or_length_cannot_be_restored() -> None:
    """Rows would have other timestamps, or other places; the start is that of the checkpoint."""
    before = RateSource(10, 100, 2, Clock()).splits()
    RateSource(10.0, 100, 2, Clock(START_MS * 2)).check_restored(before)
    for other in (RateSource(11, 100, 2), RateSource(10, 99, 2), RateSource(10, 100, 1)):
        with pytest.raises(ConfigurationError, match="has changed"):
            other.check_restored(before)

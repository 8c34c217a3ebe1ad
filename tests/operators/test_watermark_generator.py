"""Watermarks from a column follow Flink's rule for bounded out-of-orderness, for every type that can be event time."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from operator_harness import context, opened

from tidegate.operators.source_splits import SourceSplits
from tidegate.operators.watermarks.watermark_generator import (
    WatermarkGenerator,
    check_event_time,
    check_timestamp_column,
    event_times_ms,
)
from tidegate.protocol.failures import OperatorError
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS
from tidegate.storage.errors import ConfigurationError


@given(st.lists(st.lists(st.none() | st.integers(-(10**6), 10**6), min_size=1)), st.integers(0, 1000))
def test_the_watermark_is_the_greatest_timestamp_less_the_delay_less_one(
    batches: list[list[int | None]], delay_ms: int
) -> None:
    """After each batch, over all rows so far; rows without a timestamp do not count, and it never goes back."""
    generator = WatermarkGenerator("t", delay_ms)
    opened(generator)
    seen: list[int] = []
    for times in batches:
        batch = pa.record_batch({"t": pa.array(times, pa.int64())})
        emitted: list[pa.RecordBatch] = []
        generator.process(batch, emitted.append)
        seen += [time for time in times if time is not None]
        assert pa.Table.from_batches(emitted).combine_chunks() == pa.Table.from_batches([batch])
        assert generator.watermark_ms == (max(seen) - delay_ms - 1 if seen else None)


@given(
    st.lists(st.lists(st.tuples(st.none() | st.integers(-50, 50), st.none() | st.booleans()), min_size=1), max_size=6),
    st.integers(0, 20),
)
def test_with_punctuations_only_marked_rows_move_event_time(
    batches: list[list[tuple[int | None, bool | None]]], delay_ms: int
) -> None:
    """All rows pass. A null is no mark."""
    generator = WatermarkGenerator("t", delay_ms, punctuated_by="p")
    opened(generator)
    seen: list[int] = []
    for rows in batches:
        times, marks = zip(*rows, strict=True)
        batch = pa.record_batch({"t": pa.array(times, pa.int64()), "p": pa.array(marks, pa.bool_())})
        emitted: list[pa.RecordBatch] = []
        generator.process(batch, emitted.append)
        seen += [time for time, marked in rows if time is not None and marked]
        assert pa.Table.from_batches(emitted).combine_chunks() == pa.Table.from_batches([batch])
        assert generator.watermark_ms == (max(seen) - delay_ms - 1 if seen else None)


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array([5, None, -7], pa.int64()), [5, None, -7]),
        (pa.array([1_999, -1], pa.int64()).cast(pa.timestamp("us")), [1, -1]),
        (pa.array([2_999_999, -1_000_000], pa.int64()).cast(pa.timestamp("ns", "Asia/Tokyo")), [2, -1]),
        (pa.array([3, None], pa.int64()).cast(pa.timestamp("s")), [3000, None]),
        (pa.array([dt.date(1970, 1, 2), None, dt.date(1969, 12, 31)]), [86_400_000, None, -86_400_000]),
        (pa.array([86_400_000], pa.int64()).cast(pa.date64()), [86_400_000]),
    ],
)
def test_timestamps_are_milliseconds_rounded_down(column: pa.Array, expected: list[int | None]) -> None:
    """Also before 1970, and in slices."""
    assert event_times_ms(pa.record_batch({"t": column}), "t").to_pylist() == expected
    assert event_times_ms(pa.record_batch({"t": column}).slice(1), "t").to_pylist() == expected[1:]


@pytest.mark.parametrize("seconds", [2**63 - 1, -(2**63), 2**55, -(2**55)])
def test_seconds_that_are_no_milliseconds_stay_far_away(seconds: int) -> None:
    """They do not come back as times of these days."""
    column = pa.array([seconds], pa.int64()).view(pa.timestamp("s"))
    (found,) = event_times_ms(pa.record_batch({"t": column}), "t").to_pylist()
    assert abs(found) > 2**62
    assert (found > 0) == (seconds > 0)


def test_the_last_watermark_stays() -> None:
    """After the end of event time nothing goes back; before the first row there is no watermark at all."""
    generator = WatermarkGenerator("t")
    opened(generator)
    assert generator.watermark_ms is None
    generator.process(pa.record_batch({"t": pa.array([-(2**63)], pa.int64())}), lambda batch: None)
    assert generator.watermark_ms == MIN_WATERMARK_MS
    assert list(generator.advance_watermark(MAX_WATERMARK_MS, lambda batch: None)) == []
    generator.process(pa.record_batch({"t": [7]}), lambda batch: None)
    assert generator.watermark_ms == MAX_WATERMARK_MS


def test_what_is_no_event_time_is_refused() -> None:
    """When the columns are known, at planning; else with the batch."""
    with pytest.raises(ConfigurationError, match=r"no such column; name one of \['a'\]"):
        check_timestamp_column(pa.schema({"a": pa.int64()}), "t")
    with pytest.raises(ConfigurationError, match="type string cannot be event time"):
        check_timestamp_column(pa.schema({"t": pa.string()}), "t")
    with pytest.raises(ConfigurationError, match=r"punctuated_by='p': there is no such column; name one of \['t'\]"):
        check_event_time(pa.schema({"t": pa.int64()}), "t", "p")
    with pytest.raises(ConfigurationError, match="the column is int64; it must be bool"):
        check_event_time(pa.schema({"t": pa.int64(), "p": pa.int64()}), "t", "p")
    with pytest.raises(ConfigurationError, match="must not be negative"):
        WatermarkGenerator("t", -1)
    generator = WatermarkGenerator("t")
    opened(generator)
    with pytest.raises(OperatorError, match="type double cannot be event time"):
        generator.process(pa.record_batch({"t": [1.5]}), lambda batch: None)


def apart(delay_ms: int = 0) -> tuple[WatermarkGenerator, SourceSplits]:
    """A generator behind a source with the splits 0, 1 and 2."""
    generator, splits = WatermarkGenerator("t", delay_ms), SourceSplits()
    splits.begin(range(3))
    generator.open(replace(context(), splits=splits), ())
    return generator, splits


def comes(generator: WatermarkGenerator, splits: SourceSplits, split: int, *times: int) -> int | None:
    """Rows of a split; the watermark behind them."""
    splits.has_rows(split)
    generator.process(pa.record_batch({"t": pa.array(times, pa.int64())}), lambda batch: None)
    return generator.watermark_ms


def test_the_split_that_is_furthest_behind_counts() -> None:
    """Each by its greatest timestamp; as long as one has had no rows, there is no watermark."""
    generator, splits = apart(10)
    assert [comes(generator, splits, split, time) for split, time in ((0, 500), (1, 100), (1, 700))] == [None] * 3
    assert comes(generator, splits, 2, 600, 300) == 500 - 11
    assert comes(generator, splits, 0, 900) == 600 - 11


def test_idle_and_ended_splits_hold_nothing_back() -> None:
    """One that has rows again does, and the watermark stays where it was until that one has got there."""
    generator, splits = apart()
    for split, time in ((0, 100), (1, 200), (2, 300)):
        comes(generator, splits, split, time)
    assert generator.watermark_ms == 99

    splits.has_nothing(0)
    generator.splits_moved()
    assert generator.watermark_ms == 199
    splits.has_ended(1)
    generator.splits_moved()
    assert generator.watermark_ms == 299
    assert comes(generator, splits, 0, 150) == 299
    assert comes(generator, splits, 2, 900) == 299
    assert comes(generator, splits, 0, 400) == 399


def test_when_all_are_idle_everything_that_was_seen_counts() -> None:
    """Nobody is behind any more."""
    generator, splits = apart()
    for split in (2, 0):
        comes(generator, splits, split, 100 * split)
    assert generator.watermark_ms is None
    for split in (2, 0, 1):
        splits.has_nothing(split)
        generator.splits_moved()
    assert generator.watermark_ms == 199


def test_an_idleness_needs_a_source_with_splits() -> None:
    """Elsewhere nobody knows which of them have no rows, and nothing is passed over in silence."""
    with pytest.raises(ConfigurationError, match="in another task than its source"):
        opened(WatermarkGenerator("t", 0, 1_000))

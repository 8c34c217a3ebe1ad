"""Filters that are handed to sources: fewer rows are read, and nothing else changes."""

from __future__ import annotations

import datetime as dt
import math
from pathlib import Path
from types import SimpleNamespace
from zoneinfo import ZoneInfo

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tidegate.actors.graph.job_graph import SourceSpec
from tidegate.actors.graph.source_checks import checked_read
from tidegate.connectors import pushed_filters
from tidegate.connectors.files.source import source_of_files
from tidegate.connectors.formats import parquet_statistics
from tidegate.connectors.formats.parquet import RowGroups
from tidegate.connectors.memory_source import MemorySource
from tidegate.connectors.pushed_filters import ColumnTest, either, rows_kept, rows_renamed
from tidegate.connectors.source import FilterableSource, ReadResult, Source
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.ids import OperatorUid

UTC = dt.UTC
DAY = dt.datetime(2013, 1, 1)
BERLIN = pa.timestamp("us", "Europe/Berlin")

NUMBERS = st.integers(-3, 3)
REALS = st.sampled_from([-math.inf, -1.5, -0.0, 0.0, 0.1, 2.0, math.inf, math.nan])
TEXTS = st.sampled_from(["", "a", "ab", "b", "é", "\U0001f600", "z" * 5_000])
TIMES = st.integers(-2, 2).map(lambda days: DAY + dt.timedelta(days=days, microseconds=1))
IN_UTC = TIMES.map(lambda at: at.replace(tzinfo=UTC))
DAYS = st.integers(-2, 2).map(lambda days: DAY.date() + dt.timedelta(days=days))
LARGE = st.sampled_from([0, 1, 2**63 - 1, 2**63, 2**64 - 1])

# A type, values of it, and constants that a filter may compare them with.
KINDS: list[tuple[pa.DataType, st.SearchStrategy[object], st.SearchStrategy[object]]] = [
    (pa.int64(), NUMBERS, NUMBERS | st.sampled_from([0.5, math.nan, 2**40])),
    (pa.int8(), NUMBERS, NUMBERS | st.sampled_from([1_000, -1_000])),
    (pa.uint64(), LARGE, LARGE | st.just(-1)),
    (pa.float64(), REALS, REALS | NUMBERS),
    (pa.float32(), REALS, REALS | NUMBERS),
    (pa.string(), TEXTS, TEXTS),
    (pa.large_string(), TEXTS, TEXTS),
    (pa.bool_(), st.booleans(), st.booleans()),
    (pa.date32(), DAYS, DAYS | TIMES),
    (pa.timestamp("us"), TIMES, TIMES | DAYS),
    (pa.timestamp("ns"), TIMES, TIMES),
    (pa.timestamp("ms"), DAYS.map(lambda day: dt.datetime(day.year, day.month, day.day)), TIMES),
    (pa.timestamp("us", "UTC"), IN_UTC, IN_UTC),
    (BERLIN, IN_UTC, IN_UTC.map(lambda at: at.astimezone(ZoneInfo("Europe/Berlin")))),
    (pa.decimal128(9, 2), NUMBERS, NUMBERS),
    (pa.list_(pa.int64()), st.lists(NUMBERS, max_size=1), st.lists(NUMBERS, max_size=1)),
]
COMPARISONS = ["__eq__", "__lt__", "__le__", "__gt__", "__ge__"]


@st.composite
def column_tests(draw: st.DrawFn, column: str, constants: st.SearchStrategy[object]) -> pl.Expr:
    """A test of a column."""
    kind = draw(st.sampled_from(["compare", "compare", "is_in", "between", "is_null", "is_not_null"]))
    left = pl.col(column)
    match kind:
        case "compare":
            return getattr(left, draw(st.sampled_from(COMPARISONS)))(draw(constants))  # type: ignore[no-any-return]
        case "is_in":
            return left.is_in(draw(st.lists(constants | st.none(), max_size=3)))
        case "between":
            closed = draw(st.sampled_from(["both", "left", "right", "none"]))
            return left.is_between(draw(constants), draw(constants), closed)  # type: ignore[arg-type]
    return left.is_null() if kind == "is_null" else left.is_not_null()


@st.composite
def cases(draw: st.DrawFn) -> tuple[pa.Table, pl.Expr, dict[str, object]]:
    """Rows in some order, a filter that polars can evaluate, and how the file is written."""
    columns, conditions = {}, []
    rows = draw(st.integers(0, 12))
    for name in ("a", "b.c"):
        kind, values, constants = draw(st.sampled_from(KINDS))
        drawn = draw(st.lists(values | st.none(), min_size=rows, max_size=rows))
        if draw(st.booleans()):
            drawn.sort(key=lambda value: (value is None, str(value)))
        columns[name] = pa.array(drawn, kind)
        conditions.append(draw(column_tests(name, constants)))
    table = pa.table(columns)
    condition = conditions[0] if draw(st.booleans()) else conditions[0] & conditions[1]
    try:
        pl.from_arrow(table).lazy().filter(condition).collect()  # type: ignore[union-attr]
    except pl.exceptions.PolarsError:
        condition = pl.col("a").is_null()
    statistics = draw(st.sampled_from([True, True, False, ["a"]]))
    return table, condition, {"row_group_size": draw(st.integers(1, 5)), "write_statistics": statistics}


def kept(batch: pa.RecordBatch, condition: pl.Expr, first: int) -> list[tuple[int, str]]:
    """Number and text of each row that the filter of the program keeps."""
    frame = pl.from_arrow(batch)
    assert isinstance(frame, pl.DataFrame)
    numbered = frame.with_row_index("number", first).filter(condition)
    return [(number, str(row)) for number, *row in numbered.rows()]


def read(source: Source, condition: pl.Expr, offset: int, rows_max: int) -> tuple[list[tuple[int, str]], int, int]:
    """What passes the filter from a row on, the last position, and how many rows were skipped."""
    (split,), reader = source.splits(), source.reader()
    spec, found, skipped = SourceSpec(OperatorUid("rows"), "rows", source), [], 0
    while True:
        result = checked_read(spec, source.schema, split, offset, reader.read(split, offset, rows_max))
        if result.batch is not None:
            found += kept(result.batch, condition, offset)
        skipped += result.skipped
        offset = result.next_offset
        if result.at_end:
            return found, offset, skipped


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where each example writes its file."""
    return tmp_path_factory.mktemp("rows") / "rows.parquet"


@pytest.mark.slow
@settings(max_examples=40)
@given(case=cases(), rows_max=st.integers(1, 20))
@example((pa.table({"a": [1.0, math.nan]}), pl.col("a") > 5.0, {}), 3)
@example((pa.table({"a": [math.nan, 1.0]}), pl.col("a") == math.nan, {}), 3)
@example((pa.table({"a": pa.array([0.1], pa.float32())}), pl.col("a") == 0.1, {}), 3)
@example((pa.table({"a": pa.array([0.1], pa.float32())}), pl.col("a").is_in([0.1]), {}), 3)
@example((pa.table({"a": [-0.0]}), pl.col("a") == 0.0, {}), 3)
def test_results_and_positions_are_those_without_it(
    path: Path, case: tuple[pa.Table, pl.Expr, dict[str, object]], rows_max: int
) -> None:
    """From each row on, for any number of rows a read: the filter behind the source keeps the same rows."""
    table, condition, options = case
    pq.write_table(table, path, **options)
    source = source_of_files(str(path), schema=table.schema)
    assert isinstance(source, FilterableSource)
    tests = pushed_filters.tests_of(condition)
    pushed = source.filtered(None if tests is None else (tests,))
    for offset in range(0, table.num_rows + 1, 3):
        found, end, _ = read(pushed, condition, offset, rows_max)
        assert (found, end) == read(source, condition, offset, rows_max)[:2]
        assert end == table.num_rows


NUMBERED = pa.table({"x": range(100), "s": [f"{x:03}" for x in range(100)]})


def groups_left(table: pa.Table, condition: pl.Expr, path: Path, **options: object) -> list[int]:
    """First rows of the row groups, of ten rows each, that are read with a filter."""
    pq.write_table(table, path, row_group_size=10, **options)
    return groups_of(path, condition, table.schema)


def groups_of(path: Path, condition: pl.Expr, schema: pa.Schema) -> list[int]:
    """Likewise of a file that is there."""
    tests = pushed_filters.tests_of(condition)
    assert tests is not None, "the filter is not understood"
    groups = RowGroups(pq.ParquetFile(path), schema, (tests,))
    return [row for row in groups.starts[:-1] if groups.next_row(row) == row]


@pytest.mark.parametrize(
    ("condition", "left"),
    [
        (pl.col("x") == 25, [20]),
        (pl.col("x") < 20, [0, 10]),
        (pl.col("x") <= 20, [0, 10, 20]),
        (pl.col("x") > 89, [90]),
        (pl.lit(89) < pl.col("x"), [90]),
        (pl.col("x") >= 89, [80, 90]),
        (pl.col("x").is_between(39, 40), [30, 40]),
        (pl.col("x").is_between(39, 40, "right"), [40]),
        (pl.col("x").is_in([5, 95, None]), [0, 90]),
        (pl.col("x").is_in([]), []),
        (pl.col("x").is_in(list(range(5, 15)) + list(range(200, 400))), [*range(0, 100, 10)]),
        (pl.col("x").is_in(list(range(75, 400))), [70, 80, 90]),
        (pl.col("x").is_null(), []),
        (pl.col("x").is_not_null(), [*range(0, 100, 10)]),
        (pl.col("s") > "085", [80, 90]),
        ((pl.col("s") > "085") & (pl.col("x") < 90), [80]),
        ((pl.col("x") > 85).alias("y"), [80, 90]),
    ],
)
def test_row_groups_without_rows_that_count_are_left_out(path: Path, condition: pl.Expr, left: list[int]) -> None:
    """As far as least and greatest values tell."""
    assert groups_left(NUMBERED, condition, path) == left


@pytest.mark.parametrize(
    "condition",
    [
        pl.col("x") != 1,
        pl.col("x").eq_missing(1),
        (pl.col("x") == 1) | (pl.col("x") == 2),
        ~(pl.col("x") == 1),
        pl.col("x") + 1 == 1,
        pl.col("x") == pl.col("y"),
        pl.col("x").is_in([1, None], nulls_equal=True),
        (pl.col("x") == 1) & (pl.col("s").str.to_integer() > 3),
        pl.col("flag"),
    ],
)
def test_what_is_not_understood_counts_for_nothing(condition: pl.Expr) -> None:
    """Also not in part: what is not understood may fail for a row."""
    assert pushed_filters.tests_of(condition) is None


def test_nulls_pass_no_comparison(path: Path) -> None:
    """A group of nulls alone is left out, as it is for polars; with a value among them it says nothing."""
    table = pa.table({"x": pa.array([None] * 10 + [None] * 9 + [7], pa.int64())})
    assert groups_left(table, pl.col("x") < 9, path) == [10]
    assert groups_left(table, pl.col("x").is_not_null(), path) == [10]
    assert groups_left(table, pl.col("x").is_null(), path) == [0, 10]


def test_what_statistics_do_not_say_may_be_anything(path: Path) -> None:
    """No statistics at all, none of a column, and none of values that are too long."""
    assert groups_left(NUMBERED, pl.col("x") > 89, path, write_statistics=False) == [*range(0, 100, 10)]
    assert groups_left(NUMBERED, pl.col("x") > 89, path, write_statistics=["s"]) == [*range(0, 100, 10)]
    table = pa.table({"s": ["b" * 5_000] * 10})
    assert groups_left(table, pl.col("s") < "a", path) == [0]
    nans = pa.table({"x": [1.0] * 10})
    assert groups_left(nans, pl.col("x") > 5.0, path) == [0], "there may be NaN, of which statistics say nothing"
    assert groups_left(nans, pl.col("x") < 0.5, path) == []


def test_text_may_be_cut_off_in_statistics(tmp_path: Path) -> None:
    """By another writer, also within a character: then the bounds lie outside the values, or are not known."""
    deltalake = pytest.importorskip("deltalake")
    for text in ("é" * 100, "x" + "é" * 100, "z" * 100):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        deltalake.write_deltalake(str(folder), pa.table({"s": [text]}))
        (file,) = folder.glob("*.parquet")
        bound = pq.ParquetFile(file).metadata.row_group(0).column(0).statistics.max_raw
        assert bound != text.encode(), "this writer does not cut"
        schema = pq.ParquetFile(file).schema_arrow
        for condition in (pl.col("s") == text, pl.col("s") >= text, pl.col("s") <= text):
            assert groups_of(file, condition, schema) == [0]
        assert groups_of(file, pl.col("s") > "\U0001f600", schema) == []


def test_a_column_is_taken_for_no_other(path: Path) -> None:
    """Not for one in a struct whose path looks the same, and not where it is stored in another type."""
    table = pa.table({"a": [{"b": 50}] * 10, "a.b": range(10)})
    assert groups_left(table, pl.col("a.b") == 5, path) == [0]
    pq.write_table(pa.table({"x": pa.array([1], pa.int32())}), path)
    assert groups_of(path, pl.col("x") == 5, pa.schema([("x", pa.int64())])) == [0]
    assert groups_of(path, pl.col("x") == 5, pa.schema([("x", pa.int32())])) == []


def test_a_list_of_another_type_says_nothing(path: Path) -> None:
    """Nor does one with the null in it, of which no value passes; integers of another width are integers."""
    table = pa.table({"x": pa.array([1.0] * 10, pa.float32()), "n": pa.array([1] * 10, pa.int8())})
    assert groups_left(table, pl.col("x").is_in([0.5]), path) == [0]
    assert groups_left(table, pl.col("n").is_in([5, None]), path) == []
    assert groups_left(table, pl.col("n").is_in([None]), path) == []


def test_a_bound_that_is_no_value_is_not_known() -> None:
    """Text that was cut within a character, and times in another form than the column's."""
    text = SimpleNamespace(has_min_max=True, min_raw=b"a", max_raw="aé".encode()[:-1])
    assert parquet_statistics.extremes(text, pa.string(), "BYTE_ARRAY") == ("a", None)
    unit = SimpleNamespace(to_json=lambda: '{"Type": "Timestamp", "timeUnit": "milliseconds"}')
    time = SimpleNamespace(has_min_max=True, min_raw=1, max_raw=2, logical_type=unit)
    assert parquet_statistics.extremes(time, pa.timestamp("ms"), "INT64") == (1, 2)
    assert parquet_statistics.extremes(time, pa.timestamp("us"), "INT64") == (None, None)
    assert parquet_statistics.extremes(time, pa.timestamp("ms"), "INT96") == (None, None)


def test_times_with_a_zone_are_compared_as_moments(path: Path) -> None:
    """Whatever the zone in which the column shows them, and beyond the years that Python has."""
    noon = dt.datetime(2013, 6, 1, 12, tzinfo=ZoneInfo("Europe/Berlin"))
    table = pa.table({"at": pa.array([noon] * 10, BERLIN)})
    assert groups_left(table, pl.col("at") >= noon + dt.timedelta(microseconds=1), path) == []
    assert groups_left(table, pl.col("at") >= noon, path) == [0]
    assert groups_left(table, pl.col("at").is_in([noon]), path) == [0]
    assert pushed_filters.tests_of(pl.col("at") >= pl.lit(noon).dt.convert_time_zone("UTC")) is None
    far = pa.table({"at": pa.array([10**15] * 10, pa.timestamp("ms"))})
    assert groups_left(far, pl.col("at") < dt.datetime(2013, 1, 1), path) == []


def test_what_counts_for_one_reader_counts() -> None:
    """Of two readers, of a filter behind another one, and behind a step that gives columns other names."""
    first, second = (ColumnTest("a", "is_null"),), (ColumnTest("b", "is_null"),)
    assert either((first,), (second,)) == (first, second)
    assert either((first,), (first,)) == (first,)
    assert either((first,), None) is None
    assert either((first,) * 16, (second,)) is None
    assert rows_kept(pl.col("a").is_null(), (second,)) == (first + second,)
    assert rows_kept(pl.col("a") + 1 == 2, (second,)) is None
    assert rows_renamed({"b": "a", "c": "c"}, (second,)) == (first,)
    assert rows_renamed({"c": "c"}, (second,)) is None


def test_only_a_source_that_can_be_filtered_skips() -> None:
    """And the numbers must fit."""

    def checked(source: Source, result: ReadResult) -> ReadResult:
        spec = SourceSpec(OperatorUid("rows"), "rows", source)
        return checked_read(spec, source.schema, source.splits()[0], 0, result)

    plain = MemorySource(NUMBERED, 1)
    with pytest.raises(ConfigurationError, match="only a source that can be filtered may"):
        checked(plain, ReadResult(None, 3, at_end=False, skipped=3))
    with pytest.raises(ConfigurationError, match="it must be 2"):
        checked(plain, ReadResult(None, 3, at_end=False, skipped=2))
    with pytest.raises(ConfigurationError, match="has skipped -1 rows"):
        checked(plain, ReadResult(None, -1, at_end=False, skipped=-1))

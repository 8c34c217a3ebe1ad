"""`check_source` of `tidegate.testing`: it accepts a source that keeps the contract, and notices each broken rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tidegate as tg
from tidegate.connectors.files.source import source_of_files
from tidegate.testing import check_source

ROWS = 8


class Lines:
    """Two splits of some rows each. `read` is a function of its arguments."""

    schema = pa.schema([("x", pa.int64()), ("s", pa.string())])

    def splits(self) -> Sequence[tg.SourceSplit]:
        """Their payload is their first value."""
        return [tg.SourceSplit("a", b"0", ROWS), tg.SourceSplit("b", b"100", ROWS)]

    def reader(self) -> Lines:
        """Returns this object, because it has no state."""
        return self

    def read(self, split: tg.SourceSplit, offset: int, rows_max: int) -> tg.ReadResult:
        """Rows from that position on."""
        stop = min(offset + rows_max, ROWS)
        if stop <= offset:
            return tg.ReadResult(None, offset, at_end=True)
        first = int(split.payload)
        values = list(range(first + offset, first + stop))
        batch = pa.record_batch({"x": values, "s": [f"{value}" for value in values]}, schema=self.schema)
        return tg.ReadResult(batch, stop, at_end=stop == ROWS)

    def close(self) -> None:
        """Nothing to release."""


class Greedy(Lines):
    """Returns more rows than requested."""

    def read(self, split: tg.SourceSplit, offset: int, rows_max: int) -> tg.ReadResult:
        return super().read(split, offset, rows_max + 1)


class Doubled(Lines):
    """Both splits have one id."""

    def splits(self) -> Sequence[tg.SourceSplit]:
        return [super().splits()[0]] * 2


class Endless(Lines):
    """A bounded source that never ends."""

    def read(self, split: tg.SourceSplit, offset: int, rows_max: int) -> tg.ReadResult:
        result = super().read(split, offset, rows_max)
        return tg.ReadResult(result.batch, result.next_offset, at_end=False)


class Short(Lines):
    """Has fewer rows than its split names."""

    def splits(self) -> Sequence[tg.SourceSplit]:
        return [tg.SourceSplit("a", b"0", ROWS + 1)]


class Remembering(Lines):
    """Its readers continue where they were, whatever position is given."""

    def __init__(self) -> None:
        self.at: dict[str, int] = {}

    def read(self, split: tg.SourceSplit, offset: int, rows_max: int) -> tg.ReadResult:
        result = super().read(split, max(offset, self.at.get(split.split_id, 0)), rows_max)
        self.at[split.split_id] = result.next_offset
        rows = 0 if result.batch is None else result.batch.num_rows
        return tg.ReadResult(result.batch, offset + rows, result.at_end)


class BySize(Lines):
    """Skips a row if more than two are requested."""

    def read(self, split: tg.SourceSplit, offset: int, rows_max: int) -> tg.ReadResult:
        result = super().read(split, offset, rows_max)
        if rows_max <= 2 or result.batch is None or offset:
            return result
        return tg.ReadResult(pa.concat_batches([result.batch.slice(1), result.batch[-1:]]), *_end(result))


def _end(result: tg.ReadResult) -> tuple[int, bool]:
    return result.next_offset, result.at_end


class Refusing(Lines):
    """Does not accept its own splits after a restore."""

    def check_restored(self, splits: Sequence[tg.SourceSplit]) -> None:
        """Raises."""
        raise tg.ConfigurationError("other splits")


class Projected(Lines):
    """Its projection has other rows."""

    def projected(self, columns: Sequence[str]) -> tg.Source:
        """The second split twice."""

        class Other(Lines):
            schema = pa.schema([Lines.schema.field(name) for name in columns])

            def read(self, split: tg.SourceSplit, offset: int, rows_max: int) -> tg.ReadResult:
                result = Lines().read(tg.SourceSplit("b", b"100", ROWS), offset, rows_max)
                batch = None if result.batch is None else result.batch.select(list(columns))
                return tg.ReadResult(batch, *_end(result))

        return Other()


def test_a_source_that_keeps_the_contract_passes() -> None:
    """Its rows are returned, split after split."""
    assert [row["x"] for row in check_source(Lines())] == [*range(ROWS), *range(100, 100 + ROWS)]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (Greedy, "a read of at most 1 rows has returned 2"),
        (Doubled, "several splits have one id"),
        (Endless, "has neither rows nor an end"),
        (Short, "a has 8 rows, and its split names 9"),
        (Remembering, "neither rows nor an end|rows, and its split names|other rows"),
        (BySize, "return other rows"),
        (Projected, "has other rows"),
    ],
)
def test_each_broken_rule_is_noticed(source: Callable[[], tg.Source], text: str) -> None:
    """With the split, and what is wrong."""
    with pytest.raises(AssertionError, match=text):
        check_source(source())


def test_a_source_must_accept_its_own_splits() -> None:
    """The error is its own."""
    with pytest.raises(tg.ConfigurationError, match="other splits"):
        check_source(Refusing())


def test_a_file_that_is_taken_away_is_no_end(tmp_path: Path) -> None:
    """A source of files fails then; one that ends is noticed."""
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": [1, 2]}), file)
    assert len(check_source(source_of_files(str(file)), remove=file.unlink)) == 2

    class Ending(Lines):
        def read(self, split: tg.SourceSplit, offset: int, rows_max: int) -> tg.ReadResult:
            if not (tmp_path / "b").exists():
                return tg.ReadResult(None, offset, at_end=True)
            return super().read(split, offset, rows_max)

    (tmp_path / "b").touch()
    with pytest.raises(AssertionError, match="a has ended, although its rows are gone"):
        check_source(Ending(), remove=(tmp_path / "b").unlink)

"""`HybridSource` reads a bounded source, and then an unbounded one (Flink's `HybridSource`).

Rules:

- The splits of both sources are known when the job is submitted, so the start position of the second source is fixed
  before the first one is read. A prefix of a split's id identifies the source. Payloads belong to the sources.
- The start position may follow from the rows of the first source (`greatest`). Then one column of it is read while the
  program is made. The splits that were read become the splits of the job, so that both see the same rows.
- The coordinator switches when every subtask has processed all splits of the first source
  (`tidegate/actors/coordinator/source_coordinator.py`). A split of the second source is read only after that. A
  checkpoint stores the switch as the splits that subtasks have, and the splits that are not assigned.
- A reader opens a source when the first of its splits is read, and closes the first source when the second begins. So
  the second source neither buffers rows nor holds connections while the first is read.
- Columns are matched by name. A column is nullable if it is nullable in one of the sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.connectors.pushed_filters import Rows
from tidegate.connectors.source import (
    DeadLetterSource,
    DynamicSource,
    ExternallyInducedSource,
    FilterableSource,
    LastingInputSource,
    NotifiedReader,
    NotifiedSource,
    ProjectableSource,
    ReadResult,
    Source,
    SourceReader,
    SourceSplit,
    StaticSource,
    TwoPartSource,
    is_unbounded,
    never_ends,
)
from tidegate.storage.errors import ConfigurationError

FIRST = "first: "
"""Prefix of the ids of splits of the first source."""
SECOND = "then: "
"""Prefix of the ids of splits of the second source."""
_ROWS_A_READ = 1 << 16


@dataclass(frozen=True, slots=True)
class Greatest:
    """The greatest value of a column of a source. `splits`: the splits in which it was found.

    `value`: None without a value. With a second column, a dict of the greatest value for each of its values.
    """

    value: Any
    splits: tuple[SourceSplit, ...]


def greatest(first: Source, column: str, by: str | None = None) -> Greatest:
    """Reads a column of a bounded source, and returns its greatest value or, with `by`, its greatest value for each
    value of a second column.

    Raises ConfigurationError for a column that has no order, and for a source that cannot be read before its job runs.
    """
    _check_first(first)
    names = [column] if by is None else [column, by]
    for name in names:
        if name not in first.schema.names:
            raise ConfigurationError(
                f"hybrid(position=): the first source has no column {name!r}; name one of {first.schema.names}"
            )
    kind = first.schema.field(column).type
    if not any(test(kind) for test in (pa.types.is_integer, pa.types.is_timestamp, pa.types.is_date)):
        raise ConfigurationError(
            f"hybrid(position=): column {column!r} is {kind}; give a column of integers, times or dates"
        )
    if hasattr(first, "stage"):
        raise ConfigurationError(
            "hybrid(position=): rows of a DataFrame or a Ray dataset are written only at submission, so they have no "
            "position yet; compute the position in the program, and give then= a stream that starts there"
        )
    needed = [name for name in first.schema.names if name in names]
    source = first.projected(needed) if isinstance(first, ProjectableSource) else first
    splits = tuple(first.splits())
    found: list[pa.Table] = []
    reader = source.reader()
    try:
        for split in splits:
            found += _greatest_of_split(reader, split, column, by)
            found = [_greatest_rows(pa.concat_tables(found), column, by)] if found else []
    finally:
        reader.close()
    if by is None:
        return Greatest(_python_value(found[0].column(column)[0]) if found else None, splits)
    rows = zip(found[0].column(by), found[0].column(column), strict=True) if found else ()
    return Greatest({key.as_py(): _python_value(value) for key, value in rows}, splits)


def _greatest_of_split(reader: SourceReader, split: SourceSplit, column: str, by: str | None) -> list[pa.Table]:
    """Returns a table with the greatest values of a split, or an empty list without rows."""
    found: list[pa.Table] = []
    offset = 0
    while True:
        result = reader.read(split, offset, _ROWS_A_READ)
        if result.batch is not None:
            names = [column] if by is None else [column, by]
            # Without the nullability of the source, which the greatest values do not have.
            rows = pa.table({name: result.batch.column(name) for name in names})
            found = [_greatest_rows(pa.concat_tables([*found, rows]), column, by)]
        if result.at_end:
            return found
        if result.is_empty(offset):
            raise ConfigurationError(
                f"hybrid(position=): split {split.split_id!r} of the first source has no rows yet, and has not ended; "
                "give then= a stream with a position"
            )
        offset = result.next_offset
        if result.payload is not None:
            split = replace(split, payload=result.payload)


def _greatest_rows(rows: pa.Table, column: str, by: str | None) -> pa.Table:
    """Returns the greatest value of a column, or one for each value of `by`. The result is null only if there are no
    other values.
    """
    if by is None:
        return pa.table({column: pa.array([pc.max(rows.column(column))], rows.schema.field(column).type)})
    grouped = rows.group_by(by).aggregate([(column, "max")])
    return pa.table({column: grouped.column(f"{column}_max"), by: grouped.column(by)})


def _python_value(value: pa.Scalar) -> Any:
    """Returns an Arrow value as a Python value. Nanoseconds are truncated, because the position may be a little
    earlier.
    """
    kind = value.type
    if pa.types.is_timestamp(kind) and kind.unit == "ns":
        value = value.cast(pa.timestamp("us", kind.tz), safe=False)
    return value.as_py()


def hybrid_source(first: Source, second: Source, first_splits: tuple[SourceSplit, ...] | None = None) -> HybridSource:
    """Returns a source that reads `first` to its end, and then `second`.

    `first_splits`: the splits of `first`, if they are known already.

    Raises ConfigurationError if the first source is unbounded, if the second one is bounded, or if their columns
    differ.
    """
    _check_first(first)
    _check_second(second)
    schema = _common_schema(first.schema, second.schema)
    letters = [_letters_of(source) for source in (first, second)]
    if letters[0] != letters[1]:
        raise ConfigurationError(
            "hybrid: bad_rows='side' gives other columns for the first source than for then=, and one stream cannot "
            "have both; give bad_rows='skip' or 'fail' to both"
        )
    kind = StagedHybridSource if hasattr(first, "stage") else HybridSource
    return kind(first, second, schema, first_splits=first_splits)


@dataclass(frozen=True, slots=True)
class HybridSource:
    """A source that reads `first` to its end, and then `second`, with the columns of `schema`."""

    first: Source
    second: Source
    schema: pa.Schema
    unbounded: Literal[True] = True
    first_splits: tuple[SourceSplit, ...] | None = None
    """The splits of the first source from which the position of the second one was computed, or None."""

    @property
    def ends(self) -> bool:
        """Returns True if the second source has an end."""
        return not never_ends(self.second)

    @property
    def bad_rows_schema(self) -> pa.Schema | None:
        """The columns of dead letters, which are equal for both sources. None without a stream of dead letters."""
        return _letters_of(self.first)

    @property
    def notified(self) -> bool:
        """True if readers of either source are notified of completed checkpoints."""
        return any(_is_notified(source) for source in (self.first, self.second))

    def splits(self) -> Sequence[SourceSplit]:
        """Returns the splits of the first source, and then the splits of the second one."""
        return (
            *(_with_prefix(FIRST, split) for split in self._splits_of_first()),
            *(_with_prefix(SECOND, split) for split in self.second.splits()),
        )

    def _splits_of_first(self) -> Sequence[SourceSplit]:
        return self.first.splits() if self.first_splits is None else self.first_splits

    def is_second(self, split: SourceSplit) -> bool:
        """Returns whether a split belongs to the second source, which is read after the switch."""
        return split.split_id.startswith(SECOND)

    def check_restored(self, splits: Sequence[SourceSplit]) -> None:
        """Raises ConfigurationError unless both sources can continue from the splits of a checkpoint."""
        if not splits:
            return  # All subtasks had finished, and were restored since: nothing is read any more.
        strange = [split.split_id for split in splits if not split.split_id.startswith((FIRST, SECOND))]
        if strange:
            raise ConfigurationError(
                f"it was not a hybrid source, because it had the split {strange[0]!r}; give the source that it was, or "
                "start without restore"
            )
        _check_restored(self.first, _of_part(FIRST, splits), "the first source", self.first_splits)
        _check_restored(self.second, _of_part(SECOND, splits), "then=")

    def check_unread(self, splits: Sequence[SourceSplit]) -> None:
        """Raises ConfigurationError unless both sources still have the rows that were not read."""
        for source, prefix, named in ((self.first, FIRST, "the first source"), (self.second, SECOND, "then=")):
            unread = _of_part(prefix, splits)
            if unread and isinstance(source, LastingInputSource):
                try:
                    source.check_unread(unread)
                except ConfigurationError as error:
                    raise ConfigurationError(f"{named}: {error}") from error

    def projected(self, columns: Sequence[str]) -> HybridSource:
        """Returns a copy that reads only these columns.

        A source without support for projection reads all its columns.
        """
        first, second = (
            source.projected([name for name in source.schema.names if name in columns])
            if isinstance(source, ProjectableSource)
            else source
            for source in (self.first, self.second)
        )
        schema = pa.schema([self.schema.field(name) for name in columns])
        return replace(self, first=first, second=second, schema=schema)

    def filtered(self, rows: Rows) -> HybridSource:
        """Returns a copy that may skip rows which do not match the filter `rows`, if its sources support that."""
        first, second = (
            source.filtered(rows) if isinstance(source, FilterableSource) else source
            for source in (self.first, self.second)
        )
        return replace(self, first=first, second=second)

    def reader(self) -> SourceReader:
        """Returns a reader for one subtask."""
        return _HybridReader(self)


class StagedHybridSource(HybridSource):
    """A hybrid source whose first source must be written to files before it is read, such as a DataFrame."""

    def stage(self, url: str) -> Source:
        """Writes the input of the first source under `url`, once, and returns the source that reads it."""
        first: Any = self.first
        return hybrid_source(first.stage(url), self.second)

    def reopen(self, url: str) -> Source:
        """Returns the source of the input that an earlier job wrote under `url`.

        Raises NotFoundError if there is no such input.
        """
        first: Any = self.first
        return hybrid_source(first.reopen(url), self.second)


class _HybridReader:
    def __init__(self, source: HybridSource) -> None:
        self._source = source
        self._readers: dict[str, SourceReader] = {}

    def read(self, split: SourceSplit, offset: int, rows_max: int) -> ReadResult:
        """Returns the next rows of a split, with the columns of the hybrid source."""
        prefix = SECOND if self._source.is_second(split) else FIRST
        source = self._source.second if prefix == SECOND else self._source.first
        result = self._reader(prefix, source).read(_without_prefix(prefix, split), offset, rows_max)
        if not isinstance(result, ReadResult):
            return result  # The caller refuses it, by the name of the source.
        if prefix == FIRST and result.found:
            raise ConfigurationError(
                f"hybrid: the first source has found new splits ({result.found[0].split_id!r}), which only then= may "
                "do; give a first source without discovery"
            )
        if result.skipped and not isinstance(source, FilterableSource):
            raise ConfigurationError(
                f"hybrid: the source {type(source).__name__} has skipped rows, but is not a FilterableSource; return "
                "all rows, or make it one"
            )
        found = tuple(_with_prefix(SECOND, each) for each in result.found)
        return replace(result, batch=self._columns(source.schema, result.batch), found=found)

    def checkpoint_completed(self, splits: Sequence[SourceSplit]) -> None:
        """Notifies the open readers of sources that request notifications."""
        for prefix, source in ((FIRST, self._source.first), (SECOND, self._source.second)):
            reader = self._readers.get(prefix)
            if reader is not None and _is_notified(source) and isinstance(reader, NotifiedReader):
                reader.checkpoint_completed(_of_part(prefix, splits))

    def close(self) -> None:
        """Closes the open readers of both sources."""
        while self._readers:
            _, reader = self._readers.popitem()
            reader.close()

    def _reader(self, prefix: str, source: Source) -> SourceReader:
        """Returns the reader of a source. The first call for a source opens its reader."""
        if prefix not in self._readers:
            if prefix == SECOND and FIRST in self._readers:
                self._readers.pop(FIRST).close()
            self._readers[prefix] = source.reader()
        return self._readers[prefix]

    def _columns(self, schema: pa.Schema, batch: pa.RecordBatch | None) -> pa.RecordBatch | None:
        """Returns a batch with the columns of the hybrid source.

        A batch that does not have its source's columns is unchanged.
        """
        if not isinstance(batch, pa.RecordBatch) or not batch.schema.equals(schema):
            return batch
        common = self._source.schema
        return pa.RecordBatch.from_arrays([batch.column(name) for name in common.names], schema=common)


def _check_first(first: Source) -> None:
    if never_ends(first):
        raise ConfigurationError(
            "hybrid: the first source never ends, so then= would never begin; give a bounded source, such as "
            "from_files or from_delta, or swap the two"
        )
    if is_unbounded(first) or isinstance(first, ExternallyInducedSource):
        raise ConfigurationError(
            "hybrid: the first source is read in turn, although it has an end (from_kafka(end=), from_rate(rows=), "
            "from_socket); give a source of files, a table, a query, a DataFrame or a Ray dataset"
        )
    if isinstance(first, StaticSource) and first.static_splits:
        raise ConfigurationError(
            "hybrid: the first source has static_splits, and its splits are assigned while the job runs; remove "
            "static_splits"
        )


def _check_second(second: Source) -> None:
    if isinstance(second, TwoPartSource):
        raise ConfigurationError(
            f"hybrid: then= is a hybrid source itself ({type(second).__name__}), which is not supported; give one "
            "source that continues, such as from_kafka"
        )
    if not is_unbounded(second):
        raise ConfigurationError(
            "hybrid: then= is a bounded source; give one that continues, such as from_kafka, or from_files with "
            "discover=. To read two bounded sources use union"
        )
    if isinstance(second, ExternallyInducedSource) or hasattr(second, "stage"):
        raise ConfigurationError(
            "hybrid: then= is a streaming DataFrame or another source that is fed while the job runs, which is not "
            "supported; let Spark write to Kafka or to files, and read these"
        )


def _common_schema(first: pa.Schema, second: pa.Schema) -> pa.Schema:
    """Returns the common columns of both sources, in the order of the first.

    Raises ConfigurationError if they differ.
    """
    problems = [f"only the first source has {name!r}" for name in first.names if name not in second.names]
    problems += [f"only then= has {name!r}" for name in second.names if name not in first.names]
    fields = []
    for name in (name for name in first.names if name in second.names):
        one, other = first.field(name), second.field(name)
        if not one.type.equals(other.type):
            problems.append(f"{name!r} is {one.type} in the first source and {other.type} in then=")
        fields.append(pa.field(name, one.type, one.nullable or other.nullable))
    if problems:
        raise ConfigurationError(
            f"hybrid: the columns of both sources must have the same names and types: {'; '.join(problems)}. Give the "
            "columns by schema= of from_files or value= of from_kafka"
        )
    return pa.schema(fields)


def _check_restored(
    source: Source, before: Sequence[SourceSplit], named: str, known: Sequence[SourceSplit] | None = None
) -> None:
    """Raises ConfigurationError unless a source can continue from these splits, which are all splits that it had.

    `known`: the present splits of the source, if they are known already.
    """
    if hasattr(source, "reopen"):
        return  # The rows that an earlier job staged are read again.
    if isinstance(source, DynamicSource):
        try:
            source.check_restored(before)
        except ConfigurationError as error:
            raise ConfigurationError(f"{named}: {error}") from error
        return
    now = {split.split_id: split for split in (source.splits() if known is None else known)}
    was = {split.split_id: split for split in before}
    changed = sorted(split_id for split_id in was.keys() | now.keys() if was.get(split_id) != now.get(split_id))
    if changed:
        raise ConfigurationError(
            f"{named}: split {changed[0]!r} and {len(changed) - 1} more were added, removed or changed; give it the "
            "same input and the same number of splits, or start without restore"
        )


def _letters_of(source: Source) -> pa.Schema | None:
    return source.bad_rows_schema if isinstance(source, DeadLetterSource) else None


def _is_notified(source: Source) -> bool:
    return isinstance(source, NotifiedSource) and source.notified


def _of_part(prefix: str, splits: Sequence[SourceSplit]) -> list[SourceSplit]:
    return [_without_prefix(prefix, split) for split in splits if split.split_id.startswith(prefix)]


def _with_prefix(prefix: str, split: SourceSplit) -> SourceSplit:
    return replace(split, split_id=prefix + split.split_id)


def _without_prefix(prefix: str, split: SourceSplit) -> SourceSplit:
    return replace(split, split_id=split.split_id.removeprefix(prefix))

"""`WindowCalls` calls a user's function with the rows of each window, and converts its results to batches.

The function gets an Arrow table. The rows of a window are stored together, so the table is a slice that needs no copy.
The function returns Arrow or polars data, one row as a dict, several rows as an iterable of dicts, or None. Output rows
have the key, the bounds of the window, and the columns that the function returned.

With a tag for errors, a failed call emits a row on that side output in place of a result: the key, the bounds of the
window and the error. Its changes of state and timers are undone. The rows of the window are removed from the buffer
before the call, or kept, as if it had not failed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.operators.batch_rows import OUTPUT_ROWS_MAX
from tidegate.operators.functions.batch_functions import BatchResult, BatchResults
from tidegate.operators.functions.failing_rows import FailingRows, is_of_function
from tidegate.operators.operator import OperatorContext
from tidegate.operators.operator_errors import Blame, first_row
from tidegate.operators.output_schema import FromPolars, PinnedSchema
from tidegate.operators.row_values import is_record, owned_row
from tidegate.operators.state.undo import StateUndo
from tidegate.operators.windows.window_columns import WINDOW_END, WINDOW_START, bounds_of
from tidegate.operators.windows.window_specs import Times
from tidegate.protocol.edges import OutputTag
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.batches import memory_of, one_batch
from tidegate.storage.schemas.polars_frames import is_polars_frame
from tidegate.storage.user_values import value_text

log = logging.getLogger(__name__)

WindowResult: TypeAlias = "BatchResult | Mapping[str, Any] | Iterable[Mapping[str, Any]]"
WindowCall: TypeAlias = Callable[[pa.Table], WindowResult]


@dataclass(frozen=True, slots=True)
class Grouped:
    """Rows of several windows, sorted by window. The rows of one key and window form a group: group i has the rows from
    `cuts[i]` to `cuts[i + 1]`.

    `keys` has a row for each group, and no rows if there are no key columns. `starts` and `ends` are the bounds of the
    windows in ms, or None for count windows.
    """

    rows: pa.RecordBatch
    cuts: NDArray[np.int64]
    keys: pa.RecordBatch
    starts: Times | None
    ends: Times | None

    def where(self, group: int) -> str:
        """Returns a text that names the key and the window of a group, for errors."""
        key = first_row(self.keys.slice(group, 1)) if self.keys.num_columns else None
        window = "" if self.starts is None or self.ends is None else f"[{self.starts[group]}, {self.ends[group]}) ms "
        return f"window {window}of {'all rows' if key is None else f'key {value_text(key)}'}"


class WindowCalls:
    """The calls of one operator's function. `schema` has the columns that the function returns. If it is None, the
    first results determine them.

    `bounds` is the type of window bounds in the output, or None for count windows. With `replaces`, the result of a
    window replaces its previous result, so a call may return one row at most. `errors_to` is the tag of the side output
    for windows with failed calls. If it is None, a failed call fails the job. A result that does not fit `schema` is a
    failed call.
    """

    def __init__(
        self,
        fn: WindowCall,
        keys: tuple[str, ...],
        schema: pa.Schema | None,
        bounds: pa.DataType | None,
        replaces: bool = False,
        errors_to: OutputTag | None = None,
    ) -> None:
        self._fn, self._keys, self._bounds, self._replaces = fn, keys, bounds, replaces
        self.name = name_of(fn)
        """The name of the function, for errors."""
        self._own = [*keys, *([] if bounds is None else [WINDOW_START, WINDOW_END])]
        self._pinned = PinnedSchema(schema)
        self._results = BatchResults(self._pinned)
        self._undo: StateUndo | None = None
        self._failing = None if errors_to is None else FailingRows(errors_to)
        if schema is not None:
            check_no_doubles(schema.names, self._own)

    @property
    def schema(self) -> pa.Schema | None:
        """Returns the columns that the function returns, or None if they are not known yet."""
        return self._pinned.schema

    @property
    def names(self) -> list[str]:
        """Returns the names of the output columns: key, window bounds, and columns of the function, which must be
        known.
        """
        assert self._pinned.schema is not None, "results without columns"
        return [*self._own, *self._pinned.schema.names]

    @property
    def bounds(self) -> pa.DataType | None:
        """Returns the type of window bounds in the output, or None for count windows."""
        return self._bounds

    def results(self, context: OperatorContext, grouped: Grouped) -> Iterator[pa.RecordBatch]:
        """Calls the function for each group, and yields the output rows."""
        return (rows for _, rows in self.numbered_results(context, grouped))

    def numbered_results(
        self, context: OperatorContext, grouped: Grouped
    ) -> Iterator[tuple[NDArray[np.int64], pa.RecordBatch]]:
        """Calls the function for each group. Yields output rows in the order of the groups, with the group number of
        each row.

        Raises OperatorError, with the name of the function, the window and the key, if the function raises.
        """
        table, cuts = pa.Table.from_batches([grouped.rows]), grouped.cuts.tolist()
        parts: list[pa.RecordBatch] = []
        groups: list[int] = []
        rows, known = 0, memory_of(grouped.rows)
        self._begin(grouped)
        for group, (start, stop) in enumerate(pairwise(cuts)):
            self._choose(group, grouped)
            rows_of_group = table.slice(start, stop - start)
            with Blame(context, partial(self._describe, grouped, group), rows_of_group):
                call = partial(self._found, rows_of_group, grouped.rows.schema, known)
                found = self._attempt(group, call)
            parts += found
            groups += [group] * len(found)
            rows += sum(part.num_rows for part in found)
            if rows >= OUTPUT_ROWS_MAX:
                yield from self._joined(parts, groups, grouped)
                parts, groups, rows = [], [], 0
        self._end(len(cuts) - 1)
        yield from self._joined(parts, groups, grouped)
        self._set_aside(context, grouped)

    def _found(self, rows: pa.Table, source: pa.Schema, known: Set[int]) -> list[pa.RecordBatch]:
        """Calls the function with the rows of one window. Returns its results as batches."""
        return self._conformed(self._fn(rows), source, known)

    def _attempt(self, number: int, call: Callable[[], list[pa.RecordBatch]], place: str = "") -> list[pa.RecordBatch]:
        """Makes a call.

        If it fails and there is a side output for errors, undoes its changes, records the error for the group `number`,
        and returns no results.
        """
        if self._failing is None:
            return call()
        timers = self._mark()
        try:
            return call()
        except BaseException as error:
            if not is_of_function(error, self._undo):
                raise
            self._take_back(timers)
            self._failing.add(number, error, place)
            return []

    def _mark(self) -> int:
        """Starts a call of the function whose changes can be undone. Returns the position in the timers for
        `_take_back`.
        """
        return 0

    def _take_back(self, timers: int) -> None:
        """Undoes the changes of state and timers that a failed call made. `timers` is the result of `_mark`."""

    def _set_aside(self, context: OperatorContext, of: Grouped) -> None:
        """Sends the key and the bounds of the windows whose calls failed, with the error, to the side output."""
        if self._failing is None or not self._failing.any:
            return
        columns = self._heads(of, np.arange(of.keys.num_rows if of.starts is None else len(of.starts)))
        self._failing.leave(pa.RecordBatch.from_arrays(columns, names=self._own), context)

    def _heads(self, of: Grouped, groups: NDArray[np.int64]) -> list[pa.Array]:
        """Returns the output columns of some groups that the function does not compute: keys and window bounds."""
        heads: list[pa.Array] = of.keys.take(pa.array(groups)).columns if self._keys else []
        if self._bounds is None:
            return heads
        assert of.starts is not None and of.ends is not None, "windows without bounds"
        return [*heads, *(bounds_of(bounds[groups], self._bounds) for bounds in (of.starts, of.ends))]

    def _begin(self, grouped: Grouped) -> None:
        """Prepares calls of the function for these groups. Subclasses make the keys of the groups available to state
        and timers.
        """

    def _choose(self, group: int, grouped: Grouped) -> None:
        """Prepares the call of the function for one group. Subclasses make the group's key and window the
        current ones.
        """

    def _end(self, groups: int) -> None:
        """Ends the calls of the function for `groups` groups."""

    def _describe(self, grouped: Grouped, group: int) -> tuple[str, None]:
        """Describes the window of a failed call, for the error."""
        return f"{self.name} in the {grouped.where(group)}", None

    def _conformed(
        self, result: WindowResult, source: pa.Schema, known: Set[int] = frozenset()
    ) -> list[pa.RecordBatch]:
        if isinstance(result, Mapping) or is_record(result):
            found = [self._pinned.from_rows([owned_row(result)])]
        elif result is None or isinstance(result, pa.RecordBatch | pa.Table) or is_polars_frame(result):
            found = self._results.conformed(result, source, known)
        elif isinstance(result, Iterable) and not isinstance(result, str | bytes):
            rows = list(map(self._pinned.own_row, result))
            found = [self._pinned.from_rows(rows)] if rows else []
        else:
            found = self._results.conformed(result, source)  # raises, with the types that a function may return
        for part in found:
            check_no_doubles(part.schema.names, self._own)
        if self._replaces and (rows := sum(part.num_rows for part in found)) > 1:
            raise TypeError(
                f"the function returned {rows} rows for a window; with allowed_lateness a new result replaces the "
                "earlier result of the same key and window, so return one row, with several values in a column of "
                "lists if needed"
            )
        return found

    def _joined(
        self, parts: Sequence[pa.RecordBatch], groups: Sequence[int], grouped: Grouped
    ) -> Iterator[tuple[NDArray[np.int64], pa.RecordBatch]]:
        """Yields the results of several groups as output batches of bounded size, with the group number of each row."""
        if not parts:
            return
        schema = parts[-1].schema  # a column that was null at first has its type by now
        alike = [part if part.schema.equals(schema) else part.cast(schema) for part in parts]
        columns = one_batch(pa.Table.from_batches(alike), "results of windows").columns
        of = np.repeat(np.array(groups, dtype=np.int64), [part.num_rows for part in parts])
        heads = self._heads(grouped, of)
        rows = pa.RecordBatch.from_arrays([*heads, *columns], names=[*self._own, *schema.names])
        for start in range(0, rows.num_rows, OUTPUT_ROWS_MAX):
            yield of[start : start + OUTPUT_ROWS_MAX], rows.slice(start, OUTPUT_ROWS_MAX)


def derived_schema(fn: WindowCall, rows: pa.Schema) -> pa.Schema | None:
    """Returns the columns of a function's result, found by calling it with an empty table. None if the result does not
    determine them.

    A function that needs rows may raise. Its columns are then determined when the job runs.
    """
    try:
        result = fn(rows.empty_table())
        if isinstance(result, pa.RecordBatch | pa.Table):
            schema = result.schema.remove_metadata()
        elif is_polars_frame(result):
            schema = FromPolars().convert(result, rows).schema
        elif isinstance(result, Mapping) or is_record(result):
            schema = PinnedSchema().from_rows([owned_row(result)]).schema
        else:
            return None
    except Exception as error:  # noqa: BLE001 - any: the function may need rows, and is called with some later
        log.debug("the columns of %s are not known before the job runs: %r", name_of(fn), error)
        return None
    return None if any(_is_open(field.type) for field in schema) else schema


def _is_open(data_type: pa.DataType) -> bool:
    """Returns True if a type is not determined yet, because all values were null."""
    fields = [data_type.field(number) for number in range(data_type.num_fields)]
    return bool(pa.types.is_null(data_type)) or any(_is_open(field.type) for field in fields)


def check_no_doubles(names: Sequence[str], own: Sequence[str]) -> None:
    """Raises ConfigurationError if the columns `names` that a function returns include a column of the key or the
    window (`own`).
    """
    doubles = sorted({*names} & {*own})
    if doubles:
        raise ConfigurationError(
            f"the function of a window returns the columns {doubles}, which the result has anyway: they are the key or "
            "the bounds of the window. Remove them from its rows and from schema=, or give them other names"
        )


def name_of(fn: object) -> str:
    """Returns the name of a function, or of the class of a function object."""
    return str(getattr(fn, "__qualname__", None) or type(fn).__name__)

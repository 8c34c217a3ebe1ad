"""`Combiner` pre-aggregates each batch at the sender, before the exchange by key: the rows of one key (and window
slice) become one combined row.

Rules:

- Each batch becomes one batch, at the same position between other batches and watermarks. The combiner keeps nothing
  between batches, so it has no state to snapshot.
- Combined rows are in the order of the first rows of their groups. Merging combined rows gives bit for bit the result
  of adding the rows. Rows are sent unchanged where this does not hold: sums of floats, variances and sketches depend on
  the order of additions, lists do not get shorter, and choices depend on the order of rows
  (`LocalAggregation.is_exact`).
- Rows of windows are grouped by slice as well. The time of the first row of a group represents the times of all its
  rows, for windows and for lateness. Watermarks keep their position between batches, so each row is compared with the
  same watermark as without combining.
- The aggregate reports errors, and the sender does not: a batch with a wrong key or time is sent unchanged, and so is a
  batch whose own sum overflows its type. A sum over several batches that leaves the range of its type and returns
  within one batch raises no error if rows are combined.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from tidegate.operators.aggregates.accumulators import Accumulator, make_accumulator, value_specs
from tidegate.operators.aggregates.aggregate import Aggregate
from tidegate.operators.aggregates.aggregate_state import AggregateKind, Fields, combined_rows
from tidegate.operators.local_aggregation import CombiningRule, LocalAggregation
from tidegate.operators.windows.slices import slices_of
from tidegate.operators.windows.window_columns import row_times
from tidegate.state.common.table_columns import BatchColumns
from tidegate.state.kernels.accumulate import tally
from tidegate.state.kernels.columns import NO_MASK, Words, key_forms
from tidegate.state.key_index.dense_int_groups import DenseIntGroups, Groups
from tidegate.state.key_index.key_index import KeyIndex
from tidegate.storage.errors import ConfigurationError

_SUMS = frozenset({AggregateKind.SUM, AggregateKind.MEAN})


class Combiner:
    """Combines the rows of each batch that one sender sends, as a `LocalAggregation` describes.

    Has no state between batches.
    """

    def __init__(self, spec: LocalAggregation) -> None:
        self._spec = spec
        self._rule = CombiningRule(spec.mode)
        self._slices = None if spec.window is None else slices_of(spec.window)
        heads = spec.keys if spec.time is None or spec.time in spec.keys else (*spec.keys, spec.time)
        self._heads = list(heads)
        self._near = DenseIntGroups()
        self._seen_schema: pa.Schema | None = None
        self._columns: BatchColumns | None = None
        """Columns that store the aggregates of one batch, for the schema of the last batch.

        None if batches of that schema cannot be combined.
        """
        self._accumulators: list[Accumulator] = []
        self._state: dict[str, bool] = {}
        """Maps each state column to True if it is the number of rows in a group, which is then computed once for all
        such columns.
        """

    def combine(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Returns the batch with its rows combined by key and slice. Returns the batch itself if combining is not exact
        or would not make it smaller.
        """
        if not self._rule.looks_at(batch.num_rows):
            return batch
        if self._seen_schema is None or not batch.schema.equals(self._seen_schema):
            self._begin(batch.schema)
        if self._columns is None:
            return batch
        try:
            first = self._rule.rows_first(batch.num_rows)
            if first and self._rule.gives_up(batch.num_rows, len(self._groups(batch.slice(0, first)).first_rows)):
                return batch
            found = self._groups(batch)
        except ConfigurationError:  # a key, or a time, that the aggregate refuses
            return batch
        if not self._rule.combines(batch.num_rows, len(found.first_rows)):
            return batch
        self._columns.begin(found.slots_end)
        try:
            for accumulator in self._accumulators:
                accumulator.update(batch, found.slots)
        except OverflowError:
            return batch
        heads = batch.select(self._heads).take(pa.array(found.first_rows))
        values, of_rows = self._columns.values(found.group_slots), pa.array(found.counts)
        state = {name: of_rows if is_count else values[name] for name, is_count in self._state.items()}
        return combined_rows(heads, state, of_rows)

    def _begin(self, schema: pa.Schema) -> None:
        """Prepares the accumulators for batches of this schema."""
        self._seen_schema, self._columns = schema, None
        try:
            fields = {name: a.state_fields(name, schema) for name, a in self._spec.aggregates.items()}
        except ConfigurationError:
            return
        if set(self._heads) <= set(schema.names) and _are_exact(self._spec.aggregates, fields):
            specs = {name: value_specs(a, fields[name]) for name, a in self._spec.aggregates.items()}
            counts = {name for name, a in self._spec.aggregates.items() if _counts_rows(a)}
            self._state = {spec.name: name in counts for name, of in specs.items() for spec in of}
            columns = BatchColumns([spec for name, of in specs.items() if name not in counts for spec in of])
            self._accumulators = [
                make_accumulator(a, fields[name], columns)
                for name, a in self._spec.aggregates.items()
                if name not in counts
            ]
            self._columns = columns

    def _groups(self, batch: pa.RecordBatch) -> Groups:
        """Groups the rows of a batch by key and slice.

        Raises ConfigurationError for keys or times that the aggregate does not support.
        """
        forms = key_forms(batch, self._spec.keys)
        if self._slices is not None and self._spec.time is not None:
            times = row_times(batch, self._spec.time, self._spec.window)
            first, last = self._slices.numbers(np.array([times.min(), times.max()])).tolist()
            if first != last:
                forms.append(Words(self._slices.numbers(times), NO_MASK))
        rows = batch.num_rows
        if not forms:
            forms.append(Words(np.zeros(rows, dtype=np.int64), NO_MASK))
        words = [form for form in forms if isinstance(form, Words)]
        if len(words) == len(forms) and (near := self._near.of(words)) is not None:
            return near
        # The names are for error messages. Without keys it is the column of time, of which the slices are the groups.
        found = KeyIndex(tuple(self._heads)).upsert_forms(forms, rows)
        groups = len(found.first_rows)
        counts = np.zeros(groups, dtype=np.int64)
        tally(counts, found.slots)
        return Groups(found.slots, groups, np.arange(groups, dtype=np.int32), found.first_rows, counts)


def _counts_rows(aggregate: Aggregate) -> bool:
    """Returns whether the result of an aggregate is the number of all rows of a group, independent of their values."""
    return aggregate.kind is AggregateKind.COUNT and aggregate.column is None and aggregate.condition is None


def _are_exact(aggregates: Mapping[str, Aggregate], fields: Fields) -> bool:
    """Returns whether combining rows gives exactly the results that adding them gives.

    False if an aggregate sums floats.
    """
    return not any(a.kind in _SUMS and pa.types.is_floating(fields[name][0].type) for name, a in aggregates.items())

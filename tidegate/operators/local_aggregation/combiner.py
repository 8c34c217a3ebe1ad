"""`Combiner`: what the rows of each batch come to, by key and slice, at the sender: Flink's local aggregation.

The sender of an edge to an aggregate calls it before rows are split by key. Rules:

- A batch gives one batch, in the same place among the batches and watermarks. Nothing is kept from one to the next, so
  there is nothing to snapshot.
- The groups of a batch come in the order of their first rows. To merge them gives what adding the rows gives, bit for
  bit. Where that is not so the rows are sent: sums of floats depend on the order of additions; variances and sketches
  likewise; lists are no shorter; choices depend on the order of rows, which slices that share a node lose (`is_exact`).
- Rows of windows are grouped by slice as well: one row's time stands for all, to whoever asks for their windows, and
  whether they are late. Watermarks stand between batches, before as after, so each is judged by the same one.
- What is wrong with a batch is for the aggregate to say: then the rows are sent. So are they if a sum of a batch alone
  leaves its type. One that leaves it by the rows of several batches, and comes back within one of them, is no
  error if they are combined.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from tidegate.operators.aggregates.accumulators import Accumulator, make_accumulator, value_specs
from tidegate.operators.aggregates.aggregate import Aggregate
from tidegate.operators.aggregates.aggregate_state import AggregateKind, Fields, combined_rows
from tidegate.operators.local_aggregation.combining_rule import CombiningRule
from tidegate.operators.local_aggregation.local_aggregation import LocalAggregation
from tidegate.operators.windows.slices import slices_of
from tidegate.operators.windows.window_rows import row_times
from tidegate.state.common.batch_column import BatchColumns
from tidegate.state.kernels.accumulate import tally
from tidegate.state.kernels.columns import NO_MASK, Words, key_forms
from tidegate.state.key_index.dense_int_groups import DenseIntGroups, Groups
from tidegate.state.key_index.key_index import KeyIndex
from tidegate.storage.errors import ConfigurationError

_SUMS = frozenset({AggregateKind.SUM, AggregateKind.MEAN})


class Combiner:
    """The combiner of one sender."""

    def __init__(self, spec: LocalAggregation) -> None:
        self._spec = spec
        self._rule = CombiningRule(spec.mode)
        self._slices = None if spec.window is None else slices_of(spec.window)
        heads = spec.keys if spec.time is None or spec.time in spec.keys else (*spec.keys, spec.time)
        self._heads = list(heads)
        self._near = DenseIntGroups()
        self._seen_schema: pa.Schema | None = None
        self._columns: BatchColumns | None = None
        """None: batches of the schema that was seen last cannot be combined."""
        self._accumulators: list[Accumulator] = []
        self._state: dict[str, bool] = {}
        """The columns of the state, and which of them are how many rows a group has: these are counted once."""

    def combine(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The batch, or its rows combined."""
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
        """Batches have these columns from now on."""
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
        """Groups of the rows that have the same key and slice. ConfigurationError."""
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
        # The names are for its messages: without keys that of time, whose slices are told apart then.
        found = KeyIndex(tuple(self._heads)).upsert_forms(forms, rows)
        groups = len(found.first_rows)
        counts = np.zeros(groups, dtype=np.int64)
        tally(counts, found.slots)
        return Groups(found.slots, groups, np.arange(groups, dtype=np.int32), found.first_rows, counts)


def _counts_rows(aggregate: Aggregate) -> bool:
    """Whether it counts all rows of a group, whatever they hold."""
    return aggregate.kind is AggregateKind.COUNT and aggregate.column is None and aggregate.condition is None


def _are_exact(aggregates: Mapping[str, Aggregate], fields: Fields) -> bool:
    """Whether no sum is one of floats."""
    return not any(a.kind in _SUMS and pa.types.is_floating(fields[name][0].type) for name, a in aggregates.items())

"""`ChangelogMode` describes a stream in which rows replace or retract earlier rows.

There are two kinds:

- **Updates** (`emit="update"`): a row replaces the earlier row with the same keys. Two kinds of steps may follow: a
  table in mode "upsert" with the same keys, which keeps the newest row of each key, and `collect` (or
  `for_each_checkpoint`), which returns all rows.
- **Changes** (`emit="changes"`): the column `row_kind` marks inserted and retracted rows. Steps that process each row
  separately may follow, and also aggregates, joins and tables that support retractions.

Any other operator would count replaced rows as well, so it raises an error for such a stream. Rows with the same keys
arrive in order, from one subtask. A step that would lose this order raises an error, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pyarrow as pa

from tidegate.api.streams.expression_columns import Columns, known_schema, name_after, reads_only
from tidegate.operators.changes import CHANGE
from tidegate.operators.output_schema import empty_frame
from tidegate.protocol.edges import OutputTag
from tidegate.storage.errors import ConfigurationError

if TYPE_CHECKING:
    import polars as pl

    from tidegate.actors.graph.stream_graph import StreamNode


@dataclass(frozen=True, slots=True)
class ChangelogMode:
    """The mode of a stream of updates, in which only the newest row of each key is valid, or of a stream of changes,
    with retractions.
    """

    keys: tuple[str, ...]
    made_by: str
    """Name of the step that emits the rows, for errors."""
    changes: bool = False
    keyless: bool = False
    """True if a step has dropped key columns of changes. Then only the rows of one subtask are in order."""
    recorded: bool = False
    """True if the changes were recorded elsewhere, so that each read returns the same rows in the same order."""

    @staticmethod
    def of(node: StreamNode, keys: tuple[str, ...], *, changes: bool = False) -> ChangelogMode:
        """Returns the mode of the rows that the step `node` emits."""
        return ChangelogMode(keys, f"{node.name!r} (uid {node.uid!r})", changes)

    def refuse(self, operator: str, reason: str = "it would count old versions as separate rows") -> ConfigurationError:
        """Returns the error for an operator that cannot process a stream with updates or changes.

        `reason` is what the operator would do wrong.
        """
        which = f"the earlier row with the same {list(self.keys)}" if self.keys else "the one before it"
        advice = (
            f', or write the updates with to_table(..., mode="upsert", keys={list(self.keys)})' if self.keys else ""
        )
        what = "changes, so a row may be retracted" if self.changes else f"updates: a row replaces {which}"
        return ConfigurationError(
            f'{operator} cannot follow {self.made_by}, which emits {what}; {reason}. Use emit="final" in '
            f"{self.made_by}{advice}"
        )

    def parallelism(self, operator: str, asked: int | None, before: int) -> int | None:
        """Returns the parallelism that a following operator must have. `asked` is the requested parallelism, and
        `before` the parallelism of the previous step. Without keys the result is 1, or `before` if earlier steps have
        dropped the keys, so that rows stay in order. Raises ConfigurationError if another parallelism was requested.
        """
        if self.keys:
            return asked
        kept = before if self.keyless else 1
        if asked not in (None, kept):
            raise self.refuse(operator, f"in {asked} subtasks rows would overtake each other: use parallelism={kept}")
        return kept

    def with_kind(self, expressions: Sequence[pl.Expr | str], schema: pa.Schema | None) -> Sequence[pl.Expr | str]:
        """Returns the expressions of a `select`.

        For changes, the column `row_kind` is added unless the expressions already select it.
        """
        if not self.changes:
            return expressions
        kept = [expression for expression in expressions if not _is_kind(expression)]
        return kept if _select_kind(kept, schema) else [*kept, CHANGE]

    def check_kind_is_not_read(
        self, operator: str, expressions: Sequence[pl.Expr | str], schema: pa.Schema | None
    ) -> None:
        """Raises ConfigurationError for an expression that computes something from the column `row_kind`.

        Copying it under its own name is allowed.
        """
        if self.changes and any(_reads_kind(expression, schema) for expression in expressions):
            raise self.refuse_kind(operator)

    def check_kind_is_no_key(self, operator: str, columns: Iterable[object]) -> None:
        """Raises ConfigurationError if the stream has changes and `columns` contains `row_kind`."""
        if self.changes and CHANGE in columns:
            raise self.refuse_kind(operator)

    def refuse_kind(self, operator: str) -> ConfigurationError:
        """Returns the error for a step that reads `row_kind`."""
        return ConfigurationError(
            f"{operator} reads {CHANGE!r} of {self.made_by}, which emits changes. How often a row is retracted and "
            "inserted again depends on the sizes of batches, so the result would differ from run to run. Remove "
            f"{CHANGE!r} from the step: an aggregate, a join and an upsert interpret it themselves. Use "
            f'emit="final" in {self.made_by} for rows that are never retracted. To look at the changes themselves, '
            f"read {CHANGE!r} in the rows of collect or for_each_checkpoint"
        )

    def check_filter(self, operator: str, condition: pl.Expr, schema: pa.Schema | None = None) -> None:
        """Raises ConfigurationError for a condition that could drop a newer version of a row and keep an older version.

        For changes any condition is allowed, because the old version is retracted.
        """
        if self.changes:
            self.check_kind_is_not_read(operator, (condition,), schema)
        elif not reads_only(condition, self.keys):
            raise self.refuse(operator, "it would drop the newer version of a row, and the old version would stay")

    def renamed(self, operator: str, passed: Mapping[str, str]) -> ChangelogMode:
        """Returns the mode after a step that copies columns. `passed` maps new names to old names.

        Raises ConfigurationError if the step does not copy a column that the mode needs.
        """
        if self.changes and passed.get(CHANGE) != CHANGE:
            raise self.refuse(operator, f"it drops or changes the column {CHANGE!r}")
        names = []
        for key in self.keys:
            name = name_after(key, passed)
            if name is None:
                if self.changes:
                    return replace(self, keys=(), keyless=True)
                raise self.refuse(operator, f"it drops or changes the key column {key!r}")
            names.append(name)
        return replace(self, keys=tuple(names))

    def check_upsert(self, operator: str, keys: Sequence[str]) -> None:
        """Raises ConfigurationError unless a table with these keys keeps exactly the newest row of each key."""
        how = f"an upsert by {list(keys)}" if keys else 'a table in mode "append"'
        if not self.changes:
            if set(keys) != set(self.keys):
                raise self.refuse(operator, f"{how} would keep old versions, or lose rows")
        elif not keys:
            raise self.refuse(operator, f"{how} cannot retract rows")
        elif self.keyless or not set(self.keys) <= set(keys):
            needed = "columns that a step has dropped" if self.keyless else f"{list(self.keys)}"
            raise self.refuse(
                operator, f"{how} would receive rows of a key out of order: its keys must include {needed}"
            )


def _is_kind(expression: pl.Expr | str) -> bool:
    """Returns whether an expression only copies the column `row_kind`, under its own name."""
    if isinstance(expression, str):
        return expression == CHANGE
    return expression.meta.is_column() and expression.meta.output_name() == CHANGE


def _select_kind(expressions: Sequence[pl.Expr | str], schema: pa.Schema | None) -> bool:
    """Returns whether the columns that the expressions select include `row_kind`."""
    if schema is None or not expressions:
        return False
    import polars as pl

    try:
        return CHANGE in empty_frame(schema).select(expressions).columns
    except pl.exceptions.PolarsError:  # the step itself reports the error
        return False


def _reads_kind(expression: pl.Expr | str, schema: pa.Schema | None) -> bool:
    """Returns whether an expression uses the column `row_kind` for more than a copy under its own name."""
    if isinstance(expression, str) or _is_kind(expression):
        return False
    from tidegate.operators.functions.projection import columns_read

    read = columns_read((expression,))
    if read is not None:
        return CHANGE in read
    if expression.meta.is_column_selection() or schema is None:
        return False
    # It selects columns by a pattern or a type: without the column its result differs, or cannot be computed.
    import polars as pl

    frame = empty_frame(schema)
    try:
        return frame.select(expression).schema != frame.drop(CHANGE).select(expression).schema
    except pl.exceptions.PolarsError:
        return True


def united(streams: Sequence[tuple[ChangelogMode | None, int]]) -> ChangelogMode | None:
    """Returns the mode of a union of streams, each given with the parallelism of its last step.

    None if no stream has a mode.

    A union of changes is a stream of changes: a retraction follows its inserted row, because both come from one
    subtask. Rows of different streams may have the same keys, so the result has no keys.

    Raises ConfigurationError for a union of updates, of changes and plain rows, and of streams with different numbers
    of subtasks, whose rows would lose their order.
    """
    found = [changelog for changelog, _ in streams if changelog is not None]
    if not found:
        return None
    if not all(changelog is not None and changelog.changes for changelog, _ in streams):
        raise found[0].refuse("union", "not all of its streams are changes")
    if len({parallelism for _, parallelism in streams}) > 1:
        raise found[0].refuse("union", "its streams come from different numbers of subtasks: give them the same")
    made_by = " and ".join(dict.fromkeys(changelog.made_by for changelog in found))
    return ChangelogMode(
        (), made_by, changes=True, keyless=True, recorded=all(changelog.recorded for changelog in found)
    )


def after_function(changelog: ChangelogMode | None, schema: pa.Schema | None, operator: str) -> ChangelogMode | None:
    """Returns the mode after a function that returns one row for each row, with the columns of `schema`.

    Raises ConfigurationError if the schema lacks a key column.
    """
    if changelog is None or schema is None:
        return changelog
    return changelog.renamed(operator, {column: column for column in schema.names})


def nulls_tag(nulls_to: str | None, rows: Columns, changelog: ChangelogMode | None) -> tuple[OutputTag, ...]:
    """Returns the tag of the side output for rows without a time. Empty if `nulls_to` is None.

    Raises ConfigurationError if the columns are not known, and for a stream of updates or changes.
    """
    if nulls_to is None:
        return ()
    schema = known_schema(rows, f"assign_timestamps(nulls_to={nulls_to!r})")
    if changelog is not None:
        raise changelog.refuse("assign_timestamps(nulls_to=...)")
    return (OutputTag(nulls_to, schema),)

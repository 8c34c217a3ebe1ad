"""`ChangelogMode`: marks a stream in which rows replace or retract earlier ones.

There are two kinds:

- **Updates** (`emit="update"`): a row replaces the row before it with its keys. Two steps may follow: an upsert by the
  same keys, which keeps the newest row of each, and `collect` (or `for_each_checkpoint`), which shows all rows.
- **Changes** (`emit="changes"`): the column `row_kind` tells inserted rows from retracted ones. Steps that look at each
  row by itself may follow, and so may an aggregate that subtracts, a join, and an upsert that deletes.

Any other operator would count replaced rows as well. It refuses such a stream unless it is known to be right. Rows with
the same keys arrive in order, from one subtask; a step that would lose this order is refused as well.
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
    """A stream of updates, in which the newest row of each key counts, or of changes."""

    keys: tuple[str, ...]
    made_by: str
    """The step that emits them, for errors."""
    changes: bool = False
    keyless: bool = False
    """Whether a step has dropped keys from changes. Only the rows of one subtask are in order then."""
    recorded: bool = False
    """Whether the changes were recorded elsewhere, so that they are the same rows in the same order at each read."""

    @staticmethod
    def of(node: StreamNode, keys: tuple[str, ...], *, changes: bool = False) -> ChangelogMode:
        """Returns the mode of the rows that a step emits."""
        return ChangelogMode(keys, f"{node.name!r} (uid {node.uid!r})", changes)

    def refuse(
        self, operator: str, reason: str = "it would take old versions for rows of their own"
    ) -> ConfigurationError:
        """The error for an operator that cannot follow."""
        which = f"the one before it with the same {list(self.keys)}" if self.keys else "the one before it"
        advice = (
            f', or write the updates with to_table(..., mode="upsert", keys={list(self.keys)})' if self.keys else ""
        )
        what = "changes: a row may be taken back" if self.changes else f"updates: a row takes the place of {which}"
        return ConfigurationError(
            f"{operator} cannot follow {self.made_by}, which emits {what}, and "
            f'{reason}. Use emit="final" in {self.made_by}{advice}'
        )

    def parallelism(self, operator: str, asked: int | None, before: int) -> int | None:
        """How many subtasks an operator behind may have, where so many were asked for; `before` of the step before.

        Without keys it is one, or as many as before, so that rows stay in order. ConfigurationError if others were
        asked for.
        """
        if self.keys:
            return asked
        kept = before if self.keyless else 1
        if asked not in (None, kept):
            raise self.refuse(operator, f"in {asked} subtasks they would overtake each other; let it have {kept}")
        return kept

    def with_kind(self, expressions: Sequence[pl.Expr | str], schema: pa.Schema | None) -> Sequence[pl.Expr | str]:
        """What a `select` selects: of changes also the column that says what a row is, once."""
        if not self.changes:
            return expressions
        kept = [expression for expression in expressions if not _is_kind(expression)]
        return kept if _select_kind(kept, schema) else [*kept, CHANGE]

    def check_kind_is_not_read(
        self, operator: str, expressions: Sequence[pl.Expr | str], schema: pa.Schema | None
    ) -> None:
        """Raise ConfigurationError for an expression that reads what says whether a row comes or is taken back.

        The column itself may pass, under its own name.
        """
        if self.changes and any(_reads_kind(expression, schema) for expression in expressions):
            raise self.refuse_kind(operator)

    def check_kind_is_no_key(self, operator: str, columns: Iterable[object]) -> None:
        """Raise ConfigurationError if the column that says whether a row comes is among some columns."""
        if self.changes and CHANGE in columns:
            raise self.refuse_kind(operator)

    def refuse_kind(self, operator: str) -> ConfigurationError:
        """The error for a step that reads `row_kind`."""
        return ConfigurationError(
            f"{operator} reads {CHANGE!r} of {self.made_by}, which emits changes. How often a row is taken back and "
            "comes again depends on how batches are cut, so the result would differ from run to run. Leave "
            f"{CHANGE!r} out: an aggregate, a join and an upsert know what it means. Use "
            f'emit="final" in {self.made_by} for rows that are never taken back. To look at the changes themselves, '
            f"read {CHANGE!r} in the rows of collect or for_each_checkpoint"
        )

    def check_filter(self, operator: str, condition: pl.Expr, schema: pa.Schema | None = None) -> None:
        """Raise ConfigurationError for a condition that drops newer versions of rows whose old ones have passed.

        Of changes the old version passes by itself, or is taken back.
        """
        if self.changes:
            self.check_kind_is_not_read(operator, (condition,), schema)
        elif not reads_only(condition, self.keys):
            raise self.refuse(operator, "it would drop newer versions of rows whose old ones have passed")

    def renamed(self, operator: str, passed: Mapping[str, str]) -> ChangelogMode:
        """What follows a step that copies these columns. ConfigurationError if a column is missing that is needed."""
        if self.changes and passed.get(CHANGE) != CHANGE:
            raise self.refuse(operator, f"it does not pass on the column {CHANGE!r} as it is")
        names = []
        for key in self.keys:
            name = name_after(key, passed)
            if name is None:
                if self.changes:
                    return replace(self, keys=(), keyless=True)
                raise self.refuse(operator, f"it does not pass on the key {key!r} as it is")
            names.append(name)
        return replace(self, keys=tuple(names))

    def check_upsert(self, operator: str, keys: Sequence[str]) -> None:
        """Raise ConfigurationError unless a table with these keys keeps exactly the newest row of each key."""
        how = f"an upsert by {list(keys)}" if keys else 'a table in mode "append"'
        if not self.changes:
            if set(keys) != set(self.keys):
                raise self.refuse(operator, f"{how} would keep old versions, or lose rows")
        elif not keys:
            raise self.refuse(operator, f"{how} takes nothing back")
        elif self.keyless or not set(self.keys) <= set(keys):
            needed = "columns that a step has dropped" if self.keyless else f"{list(self.keys)}"
            raise self.refuse(operator, f"{how} would see them out of order: its keys must have {needed} among them")


def _is_kind(expression: pl.Expr | str) -> bool:
    """Whether it is the column `CHANGE`, under its own name."""
    if isinstance(expression, str):
        return expression == CHANGE
    return expression.meta.is_column() and expression.meta.output_name() == CHANGE


def _select_kind(expressions: Sequence[pl.Expr | str], schema: pa.Schema | None) -> bool:
    """Whether expressions that choose several columns have the column `CHANGE` among them."""
    if schema is None or not expressions:
        return False
    import polars as pl

    try:
        return CHANGE in empty_frame(schema).select(expressions).columns
    except pl.exceptions.PolarsError:  # the step itself finds what is wrong
        return False


def _reads_kind(expression: pl.Expr | str, schema: pa.Schema | None) -> bool:
    """Whether an expression reads the column `CHANGE`, and does not just pass it on."""
    if isinstance(expression, str) or _is_kind(expression):
        return False
    from tidegate.operators.functions.projection import columns_read

    read = columns_read((expression,))
    if read is not None:
        return CHANGE in read
    if expression.meta.is_column_selection() or schema is None:
        return False
    # It chooses columns by a pattern or a type: without the column it makes others, or cannot be computed.
    import polars as pl

    frame = empty_frame(schema)
    try:
        return frame.select(expression).schema != frame.drop(CHANGE).select(expression).schema
    except pl.exceptions.PolarsError:
        return True


def united(streams: Sequence[tuple[ChangelogMode | None, int]]) -> ChangelogMode | None:
    """What a union of streams is, each given with the subtasks of the step before. None: rows that come for good.

    Changes of all streams together are changes again: a row that is taken back follows the one that came, as both come
    from one subtask. But rows of different streams may have the same keys. ConfigurationError for a union that would
    not be read as its parts are: of updates, or where subtasks differ, so that rows would be dealt out anew.
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
    """What follows a function that keeps each row and makes rows of a schema; its result must have the keys."""
    if changelog is None or schema is None:
        return changelog
    return changelog.renamed(operator, {column: column for column in schema.names})


def nulls_tag(nulls_to: str | None, rows: Columns, changelog: ChangelogMode | None) -> tuple[OutputTag, ...]:
    """The tag of rows without a time, if it has a name. ConfigurationError for unknown columns, and for updates."""
    if nulls_to is None:
        return ()
    schema = known_schema(rows, f"assign_timestamps(nulls_to={nulls_to!r})")
    if changelog is not None:
        raise changelog.refuse("assign_timestamps(nulls_to=...)")
    return (OutputTag(nulls_to, schema),)

"""`SideRows`: rows that a function has emitted under tags, until they leave as batches.

They leave when the call of the operator ends, like the rows that the function returned, or when there are many. So none
is held back over a barrier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tidegate.operators.batch_rows import OUTPUT_ROWS_MAX
from tidegate.operators.operator import EmitAside, OperatorContext
from tidegate.operators.operator_errors import Blame
from tidegate.operators.output_schema import PinnedSchema
from tidegate.protocol.side_outputs import OutputTag, check_tags
from tidegate.storage.errors import ConfigurationError


class SideRows:
    """The side outputs of one operator. ConfigurationError for tags that are none, or share a name.

    `holds`: rows can be taken back (`back_to`), so they leave with `leave_full` and `flush` alone, and are checked when
    they come.
    """

    def __init__(self, tags: Sequence[OutputTag], operator: str = "process", holds: bool = False) -> None:
        check_tags(operator, tags)
        self._holds = holds
        self._schemas = {tag.name: PinnedSchema(tag.schema) for tag in tags}
        self._rows: dict[str, list[Mapping[str, Any]]] = {}
        self._context: OperatorContext | None = None

    def begin(self, context: OperatorContext) -> None:
        """The operator is open: rows may come."""
        self._context = context

    def add(self, tag: OutputTag | str, row: Mapping[str, Any]) -> None:
        """Take a row. ConfigurationError for a tag that was not declared, and before the operator is open."""
        name = tag.name if isinstance(tag, OutputTag) else tag
        if name not in self._schemas:
            known = ", ".join(map(repr, self._schemas)) or "none"
            raise ConfigurationError(
                f"emit({name!r}): the step has no such side output; it has {known}: name it in side_outputs="
            )
        if self._context is None:
            raise ConfigurationError(
                f"emit({name!r}): rows can be emitted for a row, a timer or in finish, not in open"
            )
        try:
            owned = self._schemas[name].own_row(row)
        except TypeError as error:
            raise TypeError(f"emit({name!r}): {error}") from error
        rows = self._rows.setdefault(name, [])
        if self._holds:
            self._schemas[name].from_rows([owned])
        rows.append(owned)
        if len(rows) >= OUTPUT_ROWS_MAX and not self._holds:
            self._leave(name, self._context.emit_aside)

    def mark(self) -> dict[str, int]:
        """Returns what `back_to` goes back to: the number of rows that wait under each tag."""
        return {name: len(rows) for name, rows in self._rows.items()}

    def back_to(self, mark: Mapping[str, int]) -> None:
        """Drop the rows that came after a mark."""
        for name, rows in tuple(self._rows.items()):
            del rows[mark.get(name, 0) :]
            if not rows:
                del self._rows[name]

    def leave_full(self) -> None:
        """Rows that fill a batch leave. Marks from before do not hold any more."""
        for name, rows in tuple(self._rows.items()):
            if len(rows) >= OUTPUT_ROWS_MAX:
                assert self._context is not None
                self._leave(name, self._context.emit_aside)

    def flush(self) -> None:
        """All rows leave. OperatorError for rows that do not have the columns of their tag."""
        if self._rows:
            assert self._context is not None, "rows came before the operator was open"
            for name in tuple(self._rows):
                self._leave(name, self._context.emit_aside)

    def _leave(self, name: str, emit_aside: EmitAside) -> None:
        rows = self._rows.pop(name)
        assert self._context is not None
        with Blame(self._context, lambda: (f"first of the rows for the side output {name!r}", rows[0])):
            batch = self._schemas[name].from_rows(rows)
        emit_aside(name, batch)

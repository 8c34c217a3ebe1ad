"""The content of an edge of the job graph: rows by a partitioning, or the side output of an operator.

Rules of side outputs:

- An operator declares the tags of its side outputs when it is added to the program. A stream can be made of those
  tags only.
- Rows under a tag leave the task over edges of their own. Barriers, watermarks and credit treat these edges like all
  others. A side output is therefore exactly once, as the main output is.
- Rows under a tag that no step reads are dropped.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from tidegate.storage.codec import wire
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.ids import OperatorUid
from tidegate.storage.schemas.row_schemas import SchemaLike, as_schema


@wire
class PartitioningKind(enum.Enum):
    """The receiver of a row: the same subtask, the owner of its key, each subtask in turn, or all subtasks."""

    FORWARD = "forward"
    HASH = "hash"
    REBALANCE = "rebalance"
    BROADCAST = "broadcast"


@wire
@dataclass(frozen=True, slots=True)
class Partitioning:
    """The kind, and the key columns. Raises ConfigurationError unless exactly HASH has key columns."""

    kind: PartitioningKind
    keys: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (self.kind is PartitioningKind.HASH) != bool(self.keys):
            raise ConfigurationError(
                f"{self.kind.value} partitioning with keys {list(self.keys)}: hash partitioning needs at "
                f"least one key column, the other kinds take none"
            )
        if len(set(self.keys)) != len(self.keys):
            raise ConfigurationError(f"a key column is named twice: {list(self.keys)}")


RECORDS_IN_ERRORS = "numRecordsInErrors"
"""Name of the metric that counts rows that a source could not read or a function failed for. It is Flink's name."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


@dataclass(frozen=True, slots=True, init=False)
class OutputTag:
    """Names a side output and the columns of its rows: `tg.OutputTag("bad", {"k": str, "reason": str})`.

    The name has letters, digits, `_`, `-` and `.`, at most 100 of them. Raises ConfigurationError.
    """

    name: str
    schema: pa.Schema

    def __init__(self, name: str, schema: SchemaLike) -> None:
        check_tag_name(name)
        columns = as_schema(schema, f"OutputTag({name!r}, schema=)")
        if columns is None:
            raise ConfigurationError(
                f"OutputTag({name!r}): schema= is missing. Give the columns of its rows, such as schema={{'k': str}}"
            )
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "schema", columns)


class ErrorTag(OutputTag):
    """The tag of rows for which the function of a step has failed."""

    __slots__ = ()


@wire
@dataclass(frozen=True, slots=True)
class SideOutput:
    """The rows that one operator emits under one tag."""

    operator: OperatorUid
    tag: str


def check_tag_name(name: str) -> None:
    """Raises ConfigurationError for a name that a side output cannot have."""
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise ConfigurationError(
            f"a side output cannot be called {name!r}: use 1 to 100 letters, digits, '_', '-' and '.', and begin with "
            "a letter or a digit"
        )


def check_tags(operator: str, tags: Sequence[OutputTag]) -> None:
    """Raises ConfigurationError for a value that is not a tag, and for two tags of one name."""
    names: set[str] = set()
    for tag in tags:
        if not isinstance(tag, OutputTag):
            raise ConfigurationError(
                f"{operator}: side_outputs takes tags, such as tg.OutputTag('bad', schema), not {tag!r}"
            )
        if tag.name in names:
            raise ConfigurationError(f"{operator}: two side outputs are called {tag.name!r}")
        names.add(tag.name)

"""The kinds of edges of the job graph: partitioned rows of a vertex, or a side output of an operator.

Rules of side outputs:

- An operator declares the tags of its side outputs when it is added to the program. A program can read only declared
  tags.
- Each side output that is read has its own edges. Barriers, watermarks and credit treat these edges like all other
  edges. A side output is therefore exactly once, as the main output is.
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
    """The rule that chooses the receiving subtask of a row.

    FORWARD: the subtask with the sender's index. HASH: the owner of the row's key. REBALANCE: each subtask in turn.
    BROADCAST: all subtasks.
    """

    FORWARD = "forward"
    HASH = "hash"
    REBALANCE = "rebalance"
    BROADCAST = "broadcast"


@wire
@dataclass(frozen=True, slots=True)
class Partitioning:
    """The partitioning of an edge: its kind, and the key columns, which only HASH has.

    Raises ConfigurationError for a HASH partitioning without keys, for keys of another kind, or for a repeated key
    column.
    """

    kind: PartitioningKind
    keys: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (self.kind is PartitioningKind.HASH) != bool(self.keys):
            raise ConfigurationError(
                f"{self.kind.value} partitioning with keys {list(self.keys)}: give at least one key column for hash "
                f"partitioning, and none for the other kinds"
            )
        if len(set(self.keys)) != len(self.keys):
            raise ConfigurationError(f"a key column is named twice: {list(self.keys)}; name each key column once")


RECORDS_IN_ERRORS = "numRecordsInErrors"
"""Name of the metric that counts rows that a source could not read or a function failed for. It is Flink's name."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


@dataclass(frozen=True, slots=True, init=False)
class OutputTag:
    """Names a side output and the columns of its rows: `tg.OutputTag("bad", {"k": str, "reason": str})`.

    The name has 1 to 100 letters, digits, `_`, `-` and `.`, and begins with a letter or digit. Raises
    ConfigurationError for another name or a missing schema.
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
    """The tag of a side output that receives the rows for which the function of a step failed."""

    __slots__ = ()


@wire
@dataclass(frozen=True, slots=True)
class SideOutput:
    """Identifies a side output by its operator and the name of its tag."""

    operator: OperatorUid
    tag: str


def check_tag_name(name: str) -> None:
    """Raises ConfigurationError unless the name has 1 to 100 letters, digits, `_`, `-` or `.`, and begins with a letter
    or digit.
    """
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise ConfigurationError(
            f"a side output cannot be called {name!r}: use 1 to 100 letters, digits, '_', '-' and '.', and begin with "
            "a letter or a digit"
        )


def check_tags(operator: str, tags: Sequence[OutputTag]) -> None:
    """Raises ConfigurationError if a value is not an `OutputTag`, or if two tags of the operator have one name."""
    names: set[str] = set()
    for tag in tags:
        if not isinstance(tag, OutputTag):
            raise ConfigurationError(
                f"{operator}: side_outputs takes tags, such as tg.OutputTag('bad', schema), not {tag!r}"
            )
        if tag.name in names:
            raise ConfigurationError(
                f"{operator}: two side outputs are called {tag.name!r}; give each a name of its own"
            )
        names.add(tag.name)

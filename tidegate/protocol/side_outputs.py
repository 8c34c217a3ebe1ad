"""Side outputs: rows that an operator emits under a tag, beside its own output.

Rules:

- An operator says which tags it may emit under, when it is added to the program. A stream can be made of those alone.
- Rows under a tag leave the task over edges of their own. To barriers, watermarks and credit these are edges like all
  others. So a side output is exactly once as the output is.
- Rows under a tag that no step reads are dropped.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from tidegate.storage.codec import wire
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.ids import OperatorUid
from tidegate.storage.schemas.row_schemas import SchemaLike, as_schema

RECORDS_IN_ERRORS = "numRecordsInErrors"
"""The metric of rows that a source could not read, or for which a function has failed. The name is Flink's."""
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
            raise ConfigurationError(f"OutputTag({name!r}): give the columns of its rows, such as schema={{'k': str}}")
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
    """Raise ConfigurationError for what cannot name a side output."""
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise ConfigurationError(
            f"a side output cannot be called {name!r}: use 1 to 100 letters, digits, '_', '-' and '.', and begin with "
            "a letter or a digit"
        )


def check_tags(operator: str, tags: Sequence[OutputTag]) -> None:
    """Raise ConfigurationError for what is no tag, and for two tags of one name."""
    names: set[str] = set()
    for tag in tags:
        if not isinstance(tag, OutputTag):
            raise ConfigurationError(
                f"{operator}: side_outputs takes tags, such as tg.OutputTag('bad', schema), not {tag!r}"
            )
        if tag.name in names:
            raise ConfigurationError(f"{operator}: two side outputs are called {tag.name!r}")
        names.add(tag.name)

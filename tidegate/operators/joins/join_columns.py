"""Columns of a join: which of each input are its keys, what its rows look like, and which combinations are refused.

Rules: key columns come once, under the names of the left input. A column that both inputs have gets `suffix` on the
right. A join that keeps rows without a partner has null in the other columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import pyarrow as pa

from tidegate.operators.state.keys import key_schema
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.columns_text import columns_text
from tidegate.storage.schemas.dictionaries import decoded_type

JoinHow: TypeAlias = Literal["inner", "left", "right", "full", "semi", "anti"]

LEFT, RIGHT = 0, 1
"""Numbers of the inputs."""


@dataclass(frozen=True, slots=True)
class JoinSides:
    """Keys and event-time columns of both inputs. ConfigurationError if they do not fit each other.

    A join that does not ask for event time needs none.
    """

    keys: tuple[tuple[str, ...], tuple[str, ...]]
    times: tuple[str | None, str | None]
    suffix: str = "_right"

    def __post_init__(self) -> None:
        left, right = self.keys
        if not isinstance(self.suffix, str):
            raise ConfigurationError(f"join: suffix={self.suffix!r}: give what stands behind a name that both have")
        if not left or len(left) != len(right):
            raise ConfigurationError(
                f"join: on= needs at least one column, and as many of the right stream as of the left; they are "
                f"{list(left)} and {list(right)}"
            )

    def check_keys(self, left: pa.Schema, right: pa.Schema) -> None:
        """Raise ConfigurationError unless key columns are there, and have the same types on both sides."""
        types = [key_schema(schema, keys).types for schema, keys in zip((left, right), self.keys, strict=True)]
        for name1, name2, type1, type2 in zip(*self.keys, *types, strict=True):
            if type1 != type2:
                raise ConfigurationError(
                    f"join: key {name1!r} of the left stream is {type1} and {name2!r} of the right is {type2}; cast "
                    "one of them with with_columns"
                )

    def right_names(self, left: pa.Schema, right: pa.Schema) -> dict[str, str]:
        """The columns of the right input that are no keys, with their names in the result. ConfigurationError."""
        names = {}
        for name in right.names:
            if name not in self.keys[RIGHT]:
                names[name] = name + self.suffix if name in left.names else name
        taken = [*left.names, *names.values()]
        doubles = sorted({name for name in taken if taken.count(name) > 1})
        if doubles:
            raise ConfigurationError(
                f"join: {doubles} would be in the result twice; the left stream has {columns_text(left)}, the right "
                f"{columns_text(right)}: give another suffix=, or rename columns with select"
            )
        return names

    def output_schema(self, left: pa.Schema, right: pa.Schema, how: JoinHow) -> pa.Schema:
        """The columns of the result: those of the left input, then those of the right without its keys."""
        check_how(how)
        self.check_keys(left, right)
        keys = key_schema(left, self.keys[LEFT])
        fields = [keys.field(f.name) if f.name in keys.names else _plain_field(f) for f in left]
        if how in ("semi", "anti"):
            return pa.schema(fields)
        names = self.right_names(left, right)
        return pa.schema([*fields, *(_plain_field(f).with_name(names[f.name]) for f in right if f.name in names)])

    def stored_values(self, left: pa.Schema, right: pa.Schema, how: JoinHow) -> tuple[dict[str, str], dict[str, str]]:
        """Of each input the columns that are kept beside keys, with their names in the result."""
        of_left = {name: name for name in left.names if name not in self.keys[LEFT]}
        return of_left, {} if how in ("semi", "anti") else self.right_names(left, right)


def check_how(how: str) -> None:
    """Raise ConfigurationError for a kind of join that there is not."""
    if how not in get_args(JoinHow):
        raise ConfigurationError(f"join: how={how!r} is none of {list(get_args(JoinHow))}")


def plain_values(batch: pa.RecordBatch, names: Sequence[str]) -> list[pa.Array]:
    """Columns of a batch, dictionaries decoded."""
    columns = [batch.column(name) for name in names]
    return [c.dictionary_decode() if pa.types.is_dictionary(c.type) else c for c in columns]


def _plain_field(field: pa.Field) -> pa.Field:
    return pa.field(field.name, decoded_type(field.type))

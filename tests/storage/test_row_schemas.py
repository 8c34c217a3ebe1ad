"""`schema=` as Python types, dataclasses, typed dicts and annotations."""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, NotRequired, TypedDict

import pyarrow as pa
import pytest

from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.row_schemas import as_schema, python_schema, returned_schema


@dataclasses.dataclass
class Point:
    x: int
    y: float | None


class Trip(TypedDict):
    carrier: str
    at: dt.datetime
    stops: list[Point]
    delays: NotRequired[dict[str, float]]


class Pair(NamedTuple):
    k: str
    n: int


POINT = pa.struct([("x", pa.int64()), ("y", pa.float64())])
TRIP = pa.schema(
    [
        ("carrier", pa.string()),
        ("at", pa.timestamp("us")),
        ("stops", pa.list_(POINT)),
        ("delays", pa.map_(pa.string(), pa.float64())),
    ]
)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (Trip, TRIP),
        (Point, pa.schema(list(POINT))),
        (Pair, pa.schema([("k", pa.string()), ("n", pa.int64())])),
        ({"a": bool, "b": bytes, "c": dt.date}, pa.schema([("a", pa.bool_()), ("b", pa.binary()), ("c", pa.date32())])),
        ({"t": dt.time, "d": dt.timedelta}, pa.schema([("t", pa.time64("us")), ("d", pa.duration("us"))])),
        ({"x": pa.int32(), "y": typing.Optional[int]}, pa.schema([("x", pa.int32()), ("y", pa.int64())])),  # noqa: UP045
        (
            {"x": Sequence[int], "y": tuple[str, ...]},
            pa.schema([("x", pa.list_(pa.int64())), ("y", pa.list_(pa.string()))]),
        ),
        ({"x": Annotated[decimal.Decimal, pa.decimal128(9, 2)]}, pa.schema([("x", pa.decimal128(9, 2))])),
        (TRIP, TRIP),
        (None, None),
    ],
)
def test_python_types_become_columns(given: Any, expected: pa.Schema | None) -> None:
    """Each Python type has one Arrow type."""
    assert as_schema(given, "map(schema=)") == expected


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"x": decimal.Decimal}, r"map\(schema=\): 'x': Decimal is not a type of a column. A decimal needs its digits"),
        ({"x": list}, "Give the type of its values too: list"),
        ({"x": Any}, "Any is not a type of a column"),
        ({"x": int | str}, "not a type of a column"),
        ({1: int}, "the key 1 is not a column name"),
        ([("x", int)], r"takes a pa.schema, a dict of types"),
        (int, r"takes a pa.schema"),
    ],
)
def test_what_has_no_arrow_type_is_refused(given: Any, words: str) -> None:
    """The error names the argument, the column, and what to give instead."""
    with pytest.raises(ConfigurationError, match=words):
        as_schema(given, "map(schema=)")


def test_annotations_name_the_columns_of_a_result() -> None:
    """Of a function, a method and a callable object; for one row, and for many."""

    def one(row: Mapping[str, Any]) -> Trip | None: ...

    def many(row: Mapping[str, Any]) -> Iterator[Trip]:
        yield from ()

    def untyped(row: Mapping[str, Any]) -> dict[str, Any]: ...

    class Steps:
        def __call__(self, row: object) -> Pair: ...

        def process(self, row: object, context: object) -> list[Pair]: ...

    assert returned_schema(one) == TRIP
    assert returned_schema(many, many=True) == TRIP
    assert returned_schema(one, many=True) is None
    assert returned_schema(untyped) is None
    assert returned_schema(lambda row: row) is None
    assert returned_schema(Steps()) == as_schema(Pair, "")
    assert returned_schema(Steps(), many=True, method="process") == as_schema(Pair, "")
    assert returned_schema(Steps(), many=True, method="absent") is None


def test_a_schema_is_written_as_people_would_write_it() -> None:
    """The text makes the same schema again."""
    schema = pa.schema([*TRIP, ("z", pa.timestamp("ms", "UTC")), ("i", pa.int32()), ("d", pa.decimal128(9, 2))])
    names = {"pa": pa, "datetime": dt.datetime}
    assert as_schema(eval(python_schema(schema), names), "") == schema

"""JSON in SQL: what a path finds, what a schema reads, and that both are part of what state means.

`tests/cluster/test_sql_beside_spark.py` compares the functions with Spark.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from programs import nodes_of
from sql_streams import environment

import tidegate as tg

EVENTS = pa.table(
    {
        "j": [
            '{"user": {"id": 7, "tags": ["a", "b"]}, "price": 1.50, "at": "x\\"y"}',
            '{"user": {"id": "7", "tags": "a"}, "price": "2"} and more',
            "{'user': {'id': 8}}",
            "broken",
            None,
        ]
    }
)


def _values(expression: str) -> list[Any]:
    with tg.StreamEnvironment.local(1) as env:
        env.create_temporary_view("events", env.from_batches(EVENTS, splits=1, uid="events"))
        rows = env.sql(f"SELECT {expression} AS value FROM events").collect()
        assert env.execute("json").wait("4min") == "finished"
    found: list[Any] = rows.to_arrow().column("value").to_pylist()
    return found


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("get_json_object(j, '$.user.id')", ["7", "7", "8", None, None]),
        ("get_json_object(j, '$.user.tags[1]')", ["b", None, None, None, None]),
        ("get_json_object(j, '$.user.tags[*]')", ['["a","b"]', None, None, None, None]),
        ("get_json_object(j, '$.at')", ['x"y', None, None, None, None]),
        (
            "get_json_object(j, '$.user')",
            ['{"id":7,"tags":["a","b"]}', '{"id":"7","tags":"a"}', '{"id":8}', None, None],
        ),
        ("CAST(get_json_object(j, '$.price') AS DOUBLE) * 2", [3.0, 4.0, None, None, None]),
        ("from_json(j, 'user STRUCT<id: INT>').user.id", [7, None, 8, None, None]),
        ("from_json(j, 'user STRUCT<tags: ARRAY<STRING>>').user.tags[0]", ["a", None, None, None, None]),
        (
            "from_json(j, 'price DECIMAL(4,2)')",
            [{"price": Decimal("1.50")}, {"price": Decimal("2.00")}, {"price": None}, {"price": None}, None],
        ),
        ("get_json_object('{\"a\": [1]}', '$.a[0]')", ["1"] * 5),
    ],
)
def test_json_is_read_by_paths_and_schemas(expression: str, expected: list[Any]) -> None:
    """A text that cannot be read, and a value of another type, are null; what follows the value does not matter."""
    assert _values(expression) == expected


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("get_json_object(bidder, 'a.b')", r"GET_JSON_OBJECT\(bidder, 'a.b'\): a path has \$ and then .name"),
        ("get_json_object(bidder, '$.a[-1]')", r"a path has \$ and then"),
        ("get_json_object(bidder, '$.*')", r"a path has \$ and then"),
        ("get_json_object(bidder, '$.a[')", r"a path has \$ and then"),
        ("get_json_object(bidder, '')", r"a path has \$ and then"),
        ("get_json_object(bidder, bidder)", "must be a text, as a literal"),
        ("from_json(bidder, 'a')", "the schema 'a': the end is not understood; write names and types"),
        ("from_json(bidder, '')", "the end is not understood"),
        ("from_json(bidder, 'a MONEY')", "'MONEY' is not understood"),
        ("from_json(bidder, 'a INT, b MONEY')", "'MONEY' is not understood"),
        ("from_json(bidder, 'a INT b INT')", "'b' is not understood"),
        ("from_json(bidder, 'a INT NOT NULL')", "'NOT' is not understood"),
        ("from_json(bidder, 'a ARRAY')", "the end is not understood"),
        ("from_json(bidder, 'a ARRAY<INT>>')", "'>' is not understood"),
        ("from_json(bidder, 'a DECIMAL(39)')", "a decimal has 1 to 38 digits"),
        ("from_json(bidder, 'a TIMESTAMP')", "use STRING, and CAST the field"),
        ("from_json(bidder, 'a MAP<STRING, INT>')", "'MAP' is not understood"),
        ("from_json(bidder, 'a INT, a INT')", "'a' occurs twice"),
        ("from_json(bidder, 'ARRAY<INT>')", "'<' is not understood"),
        ("from_json(bidder, 'a INT', map('mode', 'FAILFAST'))", "FROM_JSON takes 2 arguments, not 3"),
        ("json_tuple(bidder, 'a')", "there is no function JSON_TUPLE"),
    ],
)
def test_other_paths_and_schemas_are_refused(expression: str, said: str) -> None:
    """With the call and its place."""
    with environment() as env, pytest.raises(tg.ConfigurationError, match=said) as refused:
        env.sql(f"SELECT {expression} AS x FROM bids")
    refused.match("SQL, line 1, column")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("01", None),
        ("1abc", None),
        ("1.", None),
        ("1,", None),
        ("truest", None),
        ("null1", None),
        ("1 2", "1"),
        ("true,", "true"),
        ('"a"b', "a"),
        ('{"a":1}2', '{"a":1}'),
    ],
)
def test_a_number_or_a_word_ends_where_it_may(text: str, expected: str | None) -> None:
    """A number or word at the root must be followed by a blank or the end, as Jackson requires."""
    assert _values(f"get_json_object('{text}', '$')")[0] == expected


def test_a_path_is_part_of_what_a_step_computes() -> None:
    """Rows in flight of another path are refused at a restore."""

    def computed(path: str) -> list[str]:
        with environment() as env:
            env.sql(f"SELECT get_json_object(bidder, '{path}') AS x FROM bids", uid="q")
            return [node.computes for node in nodes_of(env) if node.uid.startswith("q-")]

    assert computed("$.a") == computed("$.a")
    assert computed("$.a") != computed("$.b")

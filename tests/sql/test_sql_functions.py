"""Python functions in SQL: what they get and return, where they stand, and how they fail."""

from __future__ import annotations

import datetime as dt
import decimal
import pickle
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from programs import nodes_of

import tidegate as tg
from tidegate.sql.functions.row_calls import RowCalls

USERS = pa.table({"k": [1, 2, 3, 4], "mail": ["a@x", "b@y", None, "c@x"], "p": [1.5, 2.5, None, 4.0]})


@dataclass
class Parts:
    user: str
    domain: str | None


class _BadMailError(Exception):
    def __init__(self, mail: str, reason: str) -> None:
        super().__init__(mail, reason)


def domain(mail: str | None) -> str | None:
    """The part behind @."""
    return None if mail is None else mail.split("@")[1]


def parts(mail: str | None) -> Parts | None:
    """Both parts, as a row's values are: dicts."""
    return None if mail is None else {"user": mail[0], "domain": mail[2:]}  # type: ignore[return-value]


def _checked(mail: str | None) -> str:
    if mail is None:
        raise _BadMailError("none", "no mail")
    return mail


def _wrong(k: int) -> Any:
    return "three" if k == 3 else k


FUNCTIONS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "domain": (domain, {}),
    "parts": (parts, {}),
    "words": (lambda mail, by="@": (mail or "").split(by), {"returns": list[str]}),
    "more": (lambda p: p + 1, {"returns": float, "vectorized": True}),
    "both": (lambda a, b: a * b, {"returns": pa.float64(), "vectorized": True}),
    "small": (lambda k: k, {"returns": pa.uint8()}),
    "checked": (_checked, {}),
    "wrong": (_wrong, {"returns": int}),
    "shorter": (lambda p: p.head(1), {"returns": float, "vectorized": True}),
    "unsigned": (lambda k: k, {"returns": pa.uint64()}),
}


def _run(query: str) -> list[tuple[Any, ...]]:
    with tg.StreamEnvironment.local(2) as env:
        env.create_temporary_view("users", env.from_batches(USERS, splits=1, uid="users"))
        for name, (function, options) in FUNCTIONS.items():
            env.create_temporary_function(name, function, **options)
        rows = env.sql(query, emit="final").collect()
        env.execute("functions").wait("4min")
    return sorted(pl.DataFrame(rows.to_arrow()).rows(), key=repr)


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("SELECT k, domain(mail) AS d FROM users", [(1, "x"), (2, "y"), (3, None), (4, "x")]),
        ("SELECT DOMAIN(UPPER(mail)) || '!' AS d FROM users WHERE domain(mail) = 'x'", [("X!",), ("X!",)]),
        (
            "SELECT domain(mail) AS d, SUM(more(p)) AS t FROM users GROUP BY domain(mail) HAVING domain('a@b') = 'b'",
            [("x", 7.5), ("y", 3.5), (None, None)],
        ),
        ("SELECT parts(mail).user AS u FROM users WHERE k < 4", [("a",), ("b",), (None,)]),
        ("SELECT w FROM users, UNNEST(words(mail)) AS u(w) WHERE k > 2", [("",), ("c",), ("x",)]),
        ("SELECT w FROM users, UNNEST(words(mail, 'x')) AS u(w) WHERE k = 4", [("",), ("c@",)]),
        ("SELECT both(p, 2) AS b FROM users WHERE k <> 3", [(3.0,), (5.0,), (8.0,)]),
        ("SELECT small(k) + 300 AS n FROM users WHERE k = 1", [(301,)]),
        ("SELECT a.k, b.k AS o FROM users a JOIN users b ON domain(a.mail) = domain(b.mail) AND a.k < b.k", [(1, 4)]),
        ("SELECT k FROM users WHERE domain('q@w') = 'v'", []),
    ],
)
def test_a_function_stands_where_an_expression_may(query: str, expected: list[tuple[Any, ...]]) -> None:
    """It gets values of Python, None for null, and literals as well as columns."""
    assert _run(query) == expected


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("SELECT checked(mail) AS m FROM users", r"_BadMailError: .*no mail.*; row 2 of the batch: \{'k': 3"),
        ("SELECT k FROM users WHERE checked(mail) <> ''", r"'sql where'.*_BadMailError.*; row 2 of the batch"),
        ("SELECT COUNT(checked(mail)) AS n FROM users GROUP BY k", r"_BadMailError.*; row 2 of the batch"),
        ("SELECT wrong(k) AS w FROM users", r"WRONG returned .* int64 cannot hold 'three'.*; row 2 of the batch"),
        ("SELECT shorter(p) AS s FROM users", r"SHORTER returned 1 values for 4 rows"),
    ],
)
def test_a_function_that_fails_fails_the_job_with_its_row(query: str, said: str) -> None:
    """The exception of the function, and not what polars makes of it."""
    with pytest.raises(tg.JobFailedError, match=f"(?s){said}"):
        _run(query)


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("SELECT domain(mail, k) FROM users", "DOMAIN takes 1 argument, not 2"),
        ("SELECT words() FROM users", "WORDS takes 1 to 2 arguments, not 0"),
        ("SELECT unsigned(k) FROM users", r"UNSIGNED\(k\): the function returns uint64"),
        ("SELECT domain(INTERVAL '1' DAY) FROM users", "is an interval, which cannot be passed to a Python function"),
        ("SELECT missing(k) FROM users", "there is no function MISSING.*create_temporary_function"),
    ],
)
def test_a_call_that_does_not_fit_is_refused(query: str, said: str) -> None:
    """When the query is given, with its place."""
    with pytest.raises(tg.ConfigurationError, match=f"SQL, line 1, column .*{said}"):
        _run(query)


def _rows(k: int) -> Iterator[int]:
    yield k


async def _asks(k: int) -> int:
    return k


def _locked(lock: threading.Lock, k: int) -> int:
    return k


@pytest.mark.parametrize(
    ("name", "function", "options", "said"),
    [
        ("upper", domain, {}, "this name has another meaning in SQL"),
        ("count", domain, {}, "this name has another meaning in SQL"),
        ("now", domain, {}, "this name has another meaning in SQL"),
        ("case", domain, {}, "this name has another meaning in SQL"),
        ("explode", domain, {}, "this name has another meaning in SQL"),
        ("1st", domain, {}, "a name has only letters"),
        ("f", lambda k: k, {}, "its return type is missing"),
        ("f", domain, {"returns": "text"}, "is not a type of a column"),
        ("f", lambda: 1, {"returns": int}, "at least one argument"),
        ("f", lambda k, *, by: k, {"returns": int}, "keyword argument 'by' a default"),
        ("f", _rows, {}, "must return one value for each row"),
        ("f", _asks, {}, "map_async"),
        ("f", 3, {"returns": int}, "3 is not a function"),
        ("f", lambda k, model=b"x" * 2_000_000: k, {"returns": int}, "at most 1,048,576 are allowed"),
        ("f", partial(_locked, threading.Lock()), {"returns": int}, "cannot be pickled"),
    ],
)
def test_a_function_that_queries_cannot_call_is_refused(
    name: str, function: Any, options: dict[str, Any], said: str
) -> None:
    """When it is registered, with what to do."""
    with tg.StreamEnvironment.local(1) as env, pytest.raises(tg.ConfigurationError, match=said):
        env.create_temporary_function(name, function, **options)


def test_a_name_is_replaced_only_where_that_is_said() -> None:
    """Functions stay when a program is executed; views go."""
    found = []
    with tg.StreamEnvironment.local(1) as env:
        env.create_temporary_function("twice", lambda k: 2 * k, returns=int)
        for _ in range(2):
            env.create_temporary_view("users", env.from_batches(USERS, splits=1))
            rows = env.sql("SELECT Twice(k) AS k FROM users WHERE k = 4").collect()
            env.execute("twice").wait("4min")
            found.append(rows.to_arrow().column("k").to_pylist())
        with pytest.raises(tg.ConfigurationError, match="replace=True"):
            env.create_temporary_function("TWICE", lambda k: 3 * k, returns=int)
        env.create_temporary_function("TWICE", lambda k: 3 * k, returns=int, replace=True)
    assert found == [[8], [8]]


def test_a_name_is_part_of_what_a_step_computes() -> None:
    """A restore compares the name of a function, not what it computes."""

    def computed(query: str) -> list[str]:
        with tg.StreamEnvironment.local(1) as env:
            for name in ("one", "two"):
                env.create_temporary_function(name, lambda k: k, returns=int)
            env.create_temporary_view("users", env.from_batches(USERS, uid="users"))
            env.sql(query, uid="q")
            return [node.computes for node in nodes_of(env) if str(node.uid).startswith("q-")]

    assert computed("SELECT one(k) AS x FROM users") == computed("SELECT one(k) AS x FROM users")
    assert computed("SELECT one(k) AS x FROM users") != computed("SELECT two(k) AS x FROM users")


def test_a_call_is_pickled_with_its_function() -> None:
    """Also a lambda, and by plain pickle: polars pickles it as it is."""
    calls = pickle.loads(pickle.dumps(RowCalls("F", lambda k: k + 1, pa.int64(), False)))
    assert calls([pl.Series([1, 2]), pl.Series(["F"])]).to_list() == [2, 3]
    assert calls([pl.Series([], dtype=pl.Int64), pl.Series(["F"])]).dtype == pl.Int64


_AT, _SPAN = dt.datetime(2024, 1, 1, 12), dt.timedelta(seconds=1)
RESULT_TYPES: list[tuple[pa.DataType, Any, pa.DataType | None]] = [
    *((each, 1, None) for each in (pa.int8(), pa.int16(), pa.int32(), pa.int64())),
    *((each, 1.5, None) for each in (pa.float16(), pa.float32(), pa.float64())),
    *((each, _AT, None) for each in (pa.timestamp("ms"), pa.timestamp("us"), pa.timestamp("ns"))),
    *((each, _SPAN, None) for each in (pa.duration("ms"), pa.duration("us"))),
    (pa.bool_(), True, None),
    (pa.string(), "a", None),
    (pa.binary(), b"a", None),
    (pa.date32(), _AT.date(), None),
    (pa.time64("ns"), _AT.time(), None),
    (pa.timestamp("us", "Europe/Berlin"), _AT.replace(tzinfo=dt.UTC), None),
    (pa.decimal128(10, 2), decimal.Decimal("1.25"), None),
    (pa.list_(pa.int64()), [1], None),
    (pa.list_(pa.int64(), 2), [1, 2], None),
    (pa.struct([("a", pa.int32()), ("b", pa.string())]), {"a": 1, "b": "x"}, None),
    (pa.map_(pa.string(), pa.int64()), {"a": 1}, None),
    (pa.uint8(), 1, pa.int16()),
    (pa.uint16(), 1, pa.int32()),
    (pa.uint32(), 1, pa.int64()),
    (pa.large_string(), "a", pa.string()),
    (pa.large_binary(), b"a", pa.binary()),
    (pa.binary(2), b"ab", pa.binary()),
    (pa.large_list(pa.int64()), [1], pa.list_(pa.int64())),
    (pa.dictionary(pa.int32(), pa.string()), "a", pa.string()),
    (pa.time32("s"), _AT.time(), pa.time64("ns")),
    (pa.time64("us"), _AT.time(), pa.time64("ns")),
    (pa.timestamp("s"), _AT, pa.timestamp("ms")),
    (pa.timestamp("s", "UTC"), _AT.replace(tzinfo=dt.UTC), pa.timestamp("ms", "UTC")),
    (pa.duration("s"), _SPAN, pa.duration("ms")),
    (pa.date64(), _AT.date(), pa.timestamp("ms")),
    (pa.list_(pa.timestamp("s")), [_AT], pa.list_(pa.timestamp("ms"))),
    (pa.struct([("a", pa.uint8())]), {"a": 1}, None),
    (pa.struct([("a", pa.timestamp("s"))]), {"a": _AT}, pa.struct([("a", pa.timestamp("ms"))])),
    (pa.null(), None, pa.string()),
]


def test_a_type_that_sql_lacks_becomes_the_next_one_that_holds_it() -> None:
    """The stream has the types of its rows: the declared ones, or the next ones that SQL has. No value changes."""
    with tg.StreamEnvironment.local() as env:
        env.create_temporary_view("users", env.from_batches(USERS, uid="users"))
        for number, (data_type, value, _) in enumerate(RESULT_TYPES):
            env.create_temporary_function(f"f{number}", lambda _, value=value: value, returns=data_type)
        calls = ", ".join(f"f{number}(k) AS c{number}" for number in range(len(RESULT_TYPES)))
        stream = env.sql(f"SELECT {calls} FROM users")
        declared = stream.schema
        collected = stream.collect()
        assert env.execute("types").wait("4min") == "finished"
    rows = collected.to_arrow()
    assert declared is not None
    for (data_type, value, expected), field, column in zip(RESULT_TYPES, declared, rows.columns, strict=True):
        assert (field.type, column.type) == (expected or data_type,) * 2, data_type
        assert column.to_pylist() == pa.array([value] * 4, data_type).cast(expected or data_type).to_pylist()

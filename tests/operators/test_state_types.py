"""Types of state: what is put in is what a checkpoint gives back, and what cannot be kept is refused by name."""

from __future__ import annotations

import datetime as dt
import decimal
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Optional
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pytest
from state_harness import Keyed, stored, table

from tidegate.operators.state.keyed_state import KeyedState, ListState, MapState, ReducingState, ValueState
from tidegate.operators.state.state_types import SERIALIZER_KEY, Pickled, StateType
from tidegate.storage.errors import ConfigurationError


@dataclass
class Stop:
    """Where something has been."""

    name: str
    at: dt.datetime
    delay_s: float | None = None


@dataclass(frozen=True)
class Trip:
    """A dataclass that holds others."""

    stops: list[Stop]
    fares: dict[str, int]
    tags: tuple[str, ...] = ()
    note: Optional[str] = None  # noqa: UP045 - both ways of writing it


PAIR: Any = pa.struct([("a", pa.int64()), ("b", pa.int64())])
_AT = dt.datetime(2024, 2, 29, 12, 30, 0, 123456)
_TRIP = Trip([Stop("a", _AT), Stop("b", _AT, 1.5)], {"x": 1, "y": -(2**63)}, ("t", "u"))

CASES: list[tuple[Any, Any, pa.DataType]] = [
    (int, -(2**63), pa.int64()),
    (float, 1.5, pa.float64()),
    (str, "ä", pa.string()),
    (bytes, b"\x00\xff", pa.binary()),
    (bool, True, pa.bool_()),
    (dt.datetime, _AT, pa.timestamp("us")),
    (dt.date, dt.date(1, 1, 1), pa.date32()),
    (dt.time, dt.time(23, 59, 59, 999999), pa.time64("us")),
    (dt.timedelta, dt.timedelta(-1, 5, 7), pa.duration("us")),
    (pa.decimal128(5, 2), decimal.Decimal("123.45"), pa.decimal128(5, 2)),
    (int | None, 7, pa.int64()),
    (list[int], [1, 2], pa.list_(pa.int64())),
    (tuple[int | None, ...], (1, None), pa.list_(pa.int64())),
    (dict[str, list[float]], {"a": [1.0], "b": []}, pa.map_(pa.string(), pa.list_(pa.float64()))),
    (Stop, Stop("a", _AT), pa.struct({"name": pa.string(), "at": pa.timestamp("us"), "delay_s": pa.float64()})),
    (list[Trip], [_TRIP], None),
]


@pytest.mark.parametrize(("declared", "value", "dtype"), CASES, ids=lambda case: str(case)[:30])
def test_values_of_python_types_survive_a_restore(declared: Any, value: Any, dtype: pa.DataType | None) -> None:
    """As the same value of the same type, alone and in lists and maps; the stored column is of an Arrow type."""
    states = (ValueState("v", declared), ListState("xs", declared), MapState("m", str, declared))
    keyed, again = Keyed(), Keyed()
    one, items, entries = map(keyed.bind, states)
    keyed.key("a")
    one.update(value)
    items.add(value)
    entries.put("e", value)
    before = one.value(), items.get(), dict(entries.items())
    tables = stored(keyed.freeze())
    one, items, entries = map(again.bind, states)
    again.load(tables)
    again.key("a")

    assert (value, [value], {"e": value}) == before
    assert before == (one.value(), items.get(), dict(entries.items()))
    assert type(value) is type(one.value())
    if dtype is not None:
        assert {t.state: t.rows.schema.field(t.state).type for t in tables} == {
            "v": dtype,
            "xs": pa.list_(dtype),
            "m": pa.map_(pa.string(), dtype),
        }


def test_what_is_handed_out_is_a_copy() -> None:
    """Changing it, or what was put in, changes no state."""
    keyed = Keyed()
    state, trips = keyed.bind(ValueState("v", dict[str, list[int]])), keyed.bind(ListState("xs", Stop))
    keyed.key("a")
    given, stop = {"a": [1]}, Stop("a", _AT)
    state.update(given)
    trips.add(stop)
    for changed in (given, state.value()):
        changed["a"].append(2)
    for changed_stop in (stop, trips.get()[0]):
        changed_stop.name = "changed"

    assert state.value() == {"a": [1]}
    assert trips.get() == [Stop("a", _AT)]


def test_a_field_may_be_none() -> None:
    """If the value gives it as None. Alone or by the batch, a field that is forgotten is refused."""
    keyed = Keyed()
    state = keyed.bind(ValueState("v", PAIR))
    keyed.key("a")
    state.update({"a": None, "b": 2})
    assert state.value() == {"a": None, "b": 2}
    typed = StateType("v", PAIR)
    assert typed.taken_column([{"a": None, "b": 2}, None]).to_pylist() == [{"a": None, "b": 2}, None]
    with pytest.raises(TypeError, match=r"(?s)state 'v' keeps struct.*it lacks 'b'"):
        typed.taken_column([{"a": 1, "b": 2}, {"a": 1}])


def test_a_field_is_not_forgotten_in_an_array_of_objects() -> None:
    """Arrow would make one type of all dicts in it, with null where one of them lacks a field."""
    typed = StateType("v", pa.list_(PAIR))
    whole = [[{"a": None, "b": 2}], None]
    assert typed.taken_column(np.array(whole, dtype=object)).to_pylist() == whole
    with pytest.raises(TypeError, match=r"(?s)state 'v' keeps list.*it lacks 'b'"):
        typed.taken_column(np.array([[{"a": 1, "b": 2}, {"a": 1}], None], dtype=object))


@pytest.mark.parametrize(
    ("declared", "value", "text"),
    [
        (int, "1", "keeps int64, and was given .'1'."),
        (int, 1.0, "keeps int64"),
        (int, 2**63, "keeps int64"),
        (str, 1, "keeps string"),
        (list[int], [1, None], r"keeps list\[int64\].*None can be kept only inside .* Optional"),
        (list[int], "ab", "str is neither a list nor a tuple"),
        (dict[str, int], [("a", 1)], "list is not a dict"),
        (dict[str, int], {"a": "b"}, r"keeps dict\[string, int64\]"),
        (Stop, {"name": "a"}, "keeps Stop.*dict is not Stop"),
        (Stop, Stop("a", None), "keeps Stop.*at: None can be kept only"),  # type: ignore[arg-type]
        (Trip, Trip([Stop(1, _AT)], {}), "keeps Trip.*stops: name: "),  # type: ignore[arg-type]
        (PAIR, {"a": 1}, "keeps struct.*it lacks 'b'; give 'b': None for a null"),
        (PAIR, {"a": 1, "c": 2}, "keeps struct.*the type has no field 'c'"),
        (pa.list_(PAIR), [{"a": 1, "b": 2}, {"b": 1}], "it lacks 'a'"),
        (pa.map_(pa.string(), PAIR), {"x": {}}, "it lacks 'a', 'b'"),
        (dt.datetime, _AT.replace(tzinfo=dt.UTC), r"it has a time zone: declare pa\.timestamp"),
        (Pickled, (x for x in [1]), "it cannot be pickled"),
    ],
)
def test_a_value_of_another_type_is_refused_when_it_is_put_in(declared: Any, value: Any, text: str) -> None:
    """With the name of the state, its type, the value, and where in the value it is; what was kept stays."""
    keyed = Keyed()
    state = keyed.bind(ValueState("v", declared))
    keyed.key("a")

    with pytest.raises(TypeError, match=f"(?s)state 'v' {text}" if text.startswith("keeps") else f"(?s)'v'.*{text}"):
        state.update(value)
    assert state.value() is None


@dataclass
class Endless:
    """Holds itself."""

    inner: list[Endless]


@dataclass
class Made:
    """Cannot be made from its fields."""

    a: int
    b: int = field(init=False, default=1)


@dataclass
class Wrong:
    """Has a field that cannot be kept."""

    counts: list[Counter[str]]


class Point(NamedTuple):
    """No dataclass."""

    x: int


@pytest.mark.parametrize(
    ("declared", "text"),
    [
        (list, r"add the type of its elements, for example list\[int\]"),
        (dict, r"add the types of its keys and values, for example dict\[str, float\]"),
        (decimal.Decimal, r"use pa\.decimal128"),
        (tuple[int, str], "use a dataclass"),
        (int | str, "needs an Arrow type such as"),
        (Counter, r"tg\.Pickled for any object"),
        (Point, r"tg\.Pickled for any object"),
        ("int", "needs an Arrow type such as"),
        (Endless, r"Endless\.inner: Endless holds itself"),
        (Made, "Made cannot be made again from its fields alone"),
        (Wrong, r"Wrong\.counts: needs an Arrow type"),
        (dict[list[int], int], "keys of a dict cannot be .*; declare a plain type"),
        (dict[Pickled, int], "keys of a dict cannot be .*; declare a plain type"),
    ],
)
def test_types_that_cannot_be_kept_are_refused(declared: Any, text: str) -> None:
    """When the state is declared, by name, with what to do instead."""
    with pytest.raises(ConfigurationError, match=f"state 'v': .*{text}"):
        ValueState("v", declared)


def test_pickled_is_declared_with_or_without_a_call() -> None:
    """An error for `Pickled()` that advises `Pickled` would be hard to understand."""
    for declared in (Pickled, Pickled()):
        assert StateType("v", declared).taken({1}) == StateType("v", Pickled).taken({1})
    with pytest.raises(ConfigurationError, match=r"keys of a map cannot be .*; declare a plain type"):
        MapState("m", Pickled(), int)


def test_keys_of_a_map_are_plain() -> None:
    """Any other could not be found again."""
    for declared in (list[int], Pickled, Stop):
        with pytest.raises(ConfigurationError, match=r"keys of a map cannot be .*; declare a plain type"):
            MapState("m", declared, int)


@pytest.mark.parametrize("zone", ["Europe/Berlin", "America/New_York"])
def test_keys_of_a_map_are_in_no_zone_where_an_hour_comes_twice(zone: str) -> None:
    """Python takes both hours for one key, so that entries would meet."""
    with pytest.raises(ConfigurationError, match=rf"state 'm': .* hour that comes twice in {zone}.*\"us\", \"UTC\""):
        MapState("m", pa.timestamp("us", zone), int)


@pytest.mark.parametrize("zone", ["UTC", "Etc/UTC", "+02:00"])
def test_both_hours_that_come_twice_are_keys_of_a_map(zone: str) -> None:
    """Of moments that are put in as rows have them: in the zone whose clocks are set back."""
    stored = StateType("m", pa.timestamp("us", zone))
    first = dt.datetime(2024, 10, 27, 0, 30, tzinfo=dt.UTC)
    hours = [(first + dt.timedelta(hours=n)).astimezone(ZoneInfo("Europe/Berlin")) for n in (0, 1)]
    assert hours[0] == hours[1], "Python has begun to tell them apart"
    assert len({stored.taken(hour) for hour in hours}) == 2
    assert {stored.taken(hour): n for n, hour in enumerate(hours)}[stored.taken(hours[1])] == 1
    MapState("m", pa.timestamp("us", zone), int)


class Opaque:
    """No type that Arrow knows."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque) and self.n == other.n

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("declared", "use"),
    [
        (ValueState("v", Pickled), lambda state: (state.update(Opaque(1)), state.value())[1]),
        (ListState("v", Pickled), lambda state: (state.add(Opaque(1)), state.get()[0])[1]),
        (MapState("v", str, Pickled), lambda state: (state.put("a", Opaque(1)), state.get("a"))[1]),
        (ReducingState("v", max, list[Pickled]), lambda state: (state.add([Opaque(1)]), state.get()[0])[1]),
    ],
)
def test_pickled_state_says_so(declared: KeyedState, use: Any) -> None:
    """It is kept as bytes, and the stored field that holds them is marked, wherever it is; a restore unpickles."""
    keyed, again = Keyed(), Keyed()
    state, restored = keyed.bind(declared), again.bind(declared)
    keyed.key("a")
    assert use(state) == Opaque(1)
    (one,) = stored(keyed.freeze())
    again.load([one])
    again.key("a")

    column = one.rows.schema.field("v")
    marked = column.type.item_field if pa.types.is_map(column.type) else column
    marked = column.type.value_field if pa.types.is_list(column.type) else marked
    assert marked.type == pa.binary()
    assert marked.metadata == {SERIALIZER_KEY: b"pickle"}
    assert use(restored) == Opaque(1)


@pytest.mark.parametrize(("was", "now"), [(Pickled, bytes), (bytes, Pickled), (list[Pickled], list[bytes])])
def test_bytes_are_not_taken_for_pickles(was: Any, now: Any) -> None:
    """Nor pickles for bytes: neither program could read the other's state, though the type is the same."""
    keyed, again = Keyed(), Keyed()
    state = keyed.bind(ValueState("v", was))
    again.bind(ValueState("v", now))
    keyed.key("a")
    state.update(b"x" if was in (Pickled, bytes) else [b"x"])

    with pytest.raises(ConfigurationError, match=r"state 'v': .* pickled in the checkpoint"):
        again.load(stored(keyed.freeze()))


@dataclass
class Older:
    """What a program kept once."""

    n: int
    gone: str = ""


@dataclass
class Newer:
    """What it keeps now."""

    n: float
    since: str = "ever"
    tags: list[str] = field(default_factory=list)
    by: str | None = "nobody"


def test_a_dataclass_may_get_and_lose_fields() -> None:
    """A new field has its default in what was stored before (None where it may be None), a lost one is dropped."""
    keyed, again = Keyed(), Keyed()
    old = keyed.bind(MapState("v", str, Older))
    new = again.bind(MapState("v", str, Newer))
    keyed.key("a")
    old.put("e", Older(3, "x"))
    tables = stored(keyed.freeze())
    with pytest.raises(ConfigurationError, match=r"(?s)state 'v' of operator 'op-uid'.*int64.*double"):
        again.load(tables)

    narrow = [table(one.rows.cast(pa.schema({"k": pa.string(), "v": _NARROW}))) for one in tables]
    again.load(narrow)
    again.key("a")
    assert new.get("e") == Newer(3.0, "ever", [], None)


_NARROW = pa.map_(pa.string(), pa.struct({"n": pa.int32(), "gone": pa.string()}))


def test_a_state_is_widened() -> None:
    """Its rows are of the wider type at once, so that the next checkpoint has that."""
    again = Keyed()
    value, items = again.bind(ValueState("v", pa.int64())), again.bind(ListState("xs", pa.float64()))
    again.load(
        [
            table(pa.record_batch({"k": ["a"], "v": pa.array([7], pa.int8())})),
            table(pa.record_batch({"k": ["a"], "xs": pa.array([[1.5]], pa.list_(pa.float32()))}), "xs"),
        ]
    )
    again.key("a")
    value.update(value.value() + 2**40)
    items.add(0.1)

    assert [one.rows.column(one.state).to_pylist() for one in stored(again.freeze())] == [[2**40 + 7], [[1.5, 0.1]]]


def test_nan_is_one_key() -> None:
    """In dicts and maps, also after a restore: it is not equal to itself."""
    form = StateType("v", dict[float, int])

    assert form.handed_out(form.taken({float("nan"): 1}))[math.nan] == 1

"""State that was stored under older types is what it was under the new ones, or is refused by name."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.evolution import migrated


def column(values: list[Any], data_type: pa.DataType) -> pa.RecordBatch:
    """Stored rows with one column `v`; a slice, as stored rows often are."""
    return pa.record_batch([pa.array([None, *values], data_type)], names=["v"]).slice(1)


def changed(values: list[Any], before: pa.DataType, now: pa.DataType) -> list[Any]:
    """The values under the new type."""
    found = migrated(column(values, before), pa.schema([("v", now)]), "s", "u")
    found.validate(full=True)
    assert found.schema == pa.schema([("v", now)])
    values_now: list[Any] = found.column("v").to_pylist()
    return values_now


# Types with values of the first one, and what these are under the last one where Python tells them apart.
_INT8 = st.integers(-128, 127)
_WIDENED: list[tuple[pa.DataType, list[pa.DataType], st.SearchStrategy[Any]]] = [
    (pa.int8(), [pa.int16(), pa.int32(), pa.int64(), pa.float64()], _INT8),
    (pa.int32(), [pa.int64(), pa.float64()], st.integers(-(2**31), 2**31 - 1)),
    (pa.uint8(), [pa.uint16(), pa.uint64(), pa.int16(), pa.int64(), pa.float64()], st.integers(0, 255)),
    (pa.uint32(), [pa.uint64(), pa.int64(), pa.float64()], st.integers(0, 2**32 - 1)),
    (pa.float16(), [pa.float32(), pa.float64()], st.floats(width=16, allow_nan=False)),
    (pa.float32(), [pa.float64()], st.floats(width=32, allow_nan=False)),
    (pa.string(), [pa.large_string()], st.text(max_size=4)),
    (pa.binary(), [pa.large_binary()], st.binary(max_size=4)),
    (pa.date32(), [pa.date64()], st.dates()),
    (
        pa.decimal128(5, 2),
        [pa.decimal128(9, 2), pa.decimal128(7, 4), pa.decimal256(50, 2)],
        st.decimals(-999, 999, places=2),
    ),
    (
        pa.timestamp("s", "UTC"),
        [pa.timestamp("ms", "UTC"), pa.timestamp("us", "UTC")],
        st.datetimes().map(lambda t: t.replace(microsecond=0, tzinfo=dt.UTC)),
    ),
    (pa.time32("s"), [pa.time32("ms"), pa.time64("us")], st.times().map(lambda t: t.replace(microsecond=0))),
    (pa.duration("s"), [pa.duration("ms"), pa.duration("us")], st.integers(-99, 99).map(lambda n: dt.timedelta(0, n))),
    (pa.null(), [pa.int64(), pa.string(), pa.list_(pa.int8())], st.none()),
    (pa.dictionary(pa.int8(), pa.string()), [pa.dictionary(pa.int32(), pa.string())], st.sampled_from("abc")),
]

_Case = tuple[pa.DataType, pa.DataType, st.SearchStrategy[Any], Any]


def _same(value: Any) -> Any:
    return value


@st.composite
def _scalars(draw: st.DrawFn) -> _Case:
    before, others, values = draw(st.sampled_from(_WIDENED))
    return before, draw(st.sampled_from([before, *others])), values, _same


@st.composite
def _lists(draw: st.DrawFn, inner: st.SearchStrategy[_Case]) -> _Case:
    before, now, values, change = draw(inner)
    make = draw(st.sampled_from([(pa.list_, pa.list_), (pa.list_, pa.large_list), (pa.large_list, pa.large_list)]))
    lists = st.lists(st.none() | values, max_size=3)
    return make[0](before), make[1](now), lists, lambda xs: [None if x is None else change(x) for x in xs]


@st.composite
def _maps(draw: st.DrawFn, inner: st.SearchStrategy[_Case]) -> _Case:
    before, now, values, change = draw(inner)
    entries = st.dictionaries(_INT8, st.none() | values, max_size=3).map(lambda found: list(found.items()))
    key = draw(st.sampled_from([pa.int8(), pa.int64()]))
    return (
        pa.map_(pa.int8(), before),
        pa.map_(key, now),
        entries,
        lambda pairs: [(k, None if x is None else change(x)) for k, x in pairs],
    )


@st.composite
def _structs(draw: st.DrawFn, inner: st.SearchStrategy[_Case]) -> _Case:
    kept = {f"kept{i}": draw(inner) for i in range(draw(st.integers(1, 2)))}
    lost, added = draw(st.booleans()), draw(st.booleans())
    before = [pa.field(name, case[0]) for name, case in kept.items()] + [pa.field("lost", pa.int8())] * lost
    now = [pa.field(name, case[1]) for name, case in kept.items()] + [pa.field("added", pa.list_(pa.int8()))] * added
    values: dict[str, st.SearchStrategy[Any]] = {name: st.none() | case[2] for name, case in kept.items()}
    values |= {"lost": _INT8} if lost else {}

    def change(value: dict[str, Any]) -> dict[str, Any]:
        found = {name: None if value[name] is None else case[3](value[name]) for name, case in kept.items()}
        return found | ({"added": None} if added else {})

    return pa.struct(before), pa.struct(draw(st.permutations(now))), st.fixed_dictionaries(values), change


_cases = st.recursive(_scalars(), lambda inner: _lists(inner) | _maps(inner) | _structs(inner), max_leaves=4)


@given(case=_cases, data=st.data())
@settings(max_examples=150)
def test_widened_types_keep_every_value(case: _Case, data: st.DataObject) -> None:
    """At any depth: numbers, texts and times are the same, new fields are null, lost ones are gone."""
    before, now, values, change = case
    stored = data.draw(st.lists(st.none() | values, max_size=5))

    assert [None if value is None else change(value) for value in stored] == changed(stored, before, now)


@given(case=_cases)
@settings(max_examples=60)
def test_no_widening_is_taken_back(case: _Case) -> None:
    """What was widened is refused the other way round, where nothing was stored even."""
    before, now, _, _ = case
    assume(not _is_only_other_fields(before, now))

    with pytest.raises(ConfigurationError):
        changed([], now, before)


def _is_only_other_fields(before: pa.DataType, now: pa.DataType) -> bool:
    """Whether going back is allowed too: the types of all that both have are the same."""
    if pa.types.is_struct(before):
        names = {field.name for field in before} & {field.name for field in now}
        return all(_is_only_other_fields(before.field(name).type, now.field(name).type) for name in names)
    if before.equals(now):
        return True
    if before.num_fields and type(before) is type(now) and not pa.types.is_dictionary(before):
        inner = zip(_inner(before), _inner(now), strict=True)
        return all(_is_only_other_fields(old, new) for old, new in inner)
    return False


def _inner(data_type: pa.DataType) -> list[pa.DataType]:
    if pa.types.is_map(data_type):
        return [data_type.key_type, data_type.item_type]
    return [data_type.value_type]


def test_what_is_as_expected_is_not_touched() -> None:
    """The same object comes back."""
    rows = column([1], pa.int64())

    assert migrated(rows, rows.schema, "s", "u") is rows


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        (pa.int64(), pa.int32(), "int64 cannot become int32 without a loss"),
        (pa.int64(), pa.uint64(), "int64 cannot become uint64"),
        (pa.uint64(), pa.int64(), "uint64 cannot become int64"),
        (pa.int64(), pa.float64(), "int64 cannot become double"),
        (pa.float64(), pa.float32(), "double cannot become float"),
        (pa.int64(), pa.string(), "int64 cannot become string"),
        (pa.large_string(), pa.string(), "large_string cannot become string"),
        (pa.timestamp("ms"), pa.timestamp("s"), "cannot become"),
        (pa.timestamp("s"), pa.timestamp("s", "UTC"), "cannot become"),
        (pa.decimal128(5, 2), pa.decimal128(5, 1), "cannot become"),
        (pa.decimal128(5, 2), pa.decimal128(6, 4), "cannot become"),
        (pa.list_(pa.int64()), pa.list_(pa.int32()), "int64 cannot become int32"),
        (pa.list_(pa.int8(), 2), pa.list_(pa.int8(), 3), "the lists have another length"),
        (pa.struct({"a": pa.int64()}), pa.struct({"a": pa.string()}), "in field 'a', int64 cannot become string"),
        (pa.struct({"a": pa.int64()}), pa.struct({"b": pa.int64()}), "no field of struct<a: int64> is left"),
        (
            pa.struct({"a": pa.int64()}),
            pa.struct([pa.field("a", pa.int64()), pa.field("b", pa.int64(), nullable=False)]),
            "the new field 'b' may not be null",
        ),
        (pa.struct({"a": pa.int8()}), pa.struct([pa.field("a", pa.int8(), nullable=False)]), "'a' may not be null now"),
        (
            pa.map_(pa.struct({"a": pa.int8(), "b": pa.int8()}), pa.int8()),
            pa.map_(pa.struct({"a": pa.int8()}), pa.int8()),
            "the type of its keys has changed",
        ),
        (pa.dictionary(pa.int32(), pa.string()), pa.dictionary(pa.int8(), pa.string()), "other indexes"),
    ],
    ids=str,
)
def test_other_changes_are_refused_by_name(before: pa.DataType, now: pa.DataType, told: str) -> None:
    """The error says whose state it is, both types, what is wrong and what to do."""
    with pytest.raises(ConfigurationError) as caught:
        migrated(column([], before), pa.schema([("v", now)]), "count", "my-uid")

    message = str(caught.value)
    assert (
        f"state 'count' of operator 'my-uid' was stored with 'v' as {before}, and the program expects {now}" in message
    )
    assert told in message
    assert "rename the new state, or give the operator a new uid" in message


def test_a_value_that_does_not_fit_is_refused() -> None:
    """A finer unit has a smaller range; no value is wrapped around."""
    late = 2**60

    with pytest.raises(ConfigurationError, match=r"state 's' of operator 'u'.*out of bounds.*a new uid"):
        changed([late], pa.timestamp("s"), pa.timestamp("ns"))
    assert [dt.datetime(1970, 1, 1, 0, 0, 5)] == changed([5], pa.timestamp("s"), pa.timestamp("us"))


def test_other_columns_are_refused() -> None:
    """A state has the columns that it was stored with, in their order."""
    rows = pa.record_batch({"k": [1], "v": [Decimal("1.5")]})

    for names in (["k"], ["v", "k"], ["k", "v", "w"], ["k", "w"]):
        expected = pa.schema([(name, pa.int64()) for name in names])
        with pytest.raises(
            ConfigurationError, match=r"columns \(k: int64, v: decimal128\(2, 1\)\), and the program exp"
        ):
            migrated(rows, expected, "s", "u")

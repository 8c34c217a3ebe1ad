"""Keyed state: what goes in comes out, as a checkpoint would give it back, and a snapshot does not change."""

from __future__ import annotations

import datetime as dt
import math

import pyarrow as pa
import pytest
from state_harness import WHOLE, Keyed, rows_of, stored, table

from tidegate.operators.state.keyed_state import AggregatingState, ListState, MapState, ReducingState, ValueState
from tidegate.storage.errors import ConfigurationError, CorruptionError, IncompatibleStateError


def test_a_value_is_kept_for_each_key() -> None:
    """None where there is none, also after `clear` and after an update with None."""
    keyed = Keyed()
    state = keyed.bind(ValueState("n", pa.int64()))
    keyed.key("a")
    state.update(1)
    keyed.key("b")
    assert state.value() is None
    state.update(2)
    keyed.key("a")
    assert state.value() == 1
    state.update(None)
    assert state.value() is None
    keyed.key("b")
    assert state.value() == 2
    state.clear()
    assert state.value() is None
    assert keyed.freeze() == []


def test_an_unknown_method_of_a_state_is_refused() -> None:
    """The error lists the methods that the kind of state has."""
    with pytest.raises(AttributeError, match=r"no attribute 'get'; use one of clear, .*update, value$"):
        Keyed().bind(ValueState("n", pa.int64())).get()
    with pytest.raises(AttributeError, match=r"no attribute 'append'; use one of clear, add, add_all, get, update$"):
        Keyed().bind(ListState("xs", pa.int64())).append(1)


def test_a_list_is_kept_for_each_key() -> None:
    """Appended to, replaced and cleared; what is handed out is a copy."""
    keyed = Keyed()
    state = keyed.bind(ListState("xs", pa.int64()))
    keyed.key("a")
    assert state.get() == []
    state.add(1)
    state.add_all([2, 3])
    state.get().append(99)
    assert state.get() == [1, 2, 3]
    keyed.key("b")
    state.update([7])
    keyed.key("a")
    state.update([4])
    state.add(5)
    assert state.get() == [4, 5]
    state.update([])
    assert state.get() == []
    keyed.key("b")
    assert state.get() == [7]


def test_a_list_is_gone_through_without_a_copy() -> None:
    """One value after the other, also across snapshots; values that are added meanwhile do not come, and those that can
    be changed are copies."""
    keyed = Keyed()
    state, nested = keyed.bind(ListState("xs", int)), keyed.bind(ListState("ys", pa.list_(pa.int8())))
    keyed.key("a")
    assert list(state) == []
    for number in range(9):
        state.add(number)
        keyed.freeze(WHOLE)
        keyed.key("a")
    seen = []
    for number in state:
        seen.append(number)
        state.add(99)
    assert seen == list(range(9))
    assert state.get() == [*range(9), *[99] * 9]
    nested.add([1])
    for value in nested:
        value.append(2)
    assert nested.get() == [[1]]


def test_a_map_is_kept_for_each_key() -> None:
    """Entries are set, found, removed, and listed as they were when one asked."""
    keyed = Keyed()
    state = keyed.bind(MapState("m", pa.float64(), pa.int64()))
    keyed.key("a")
    state.put_all({1.0: 10, 2.0: 20})
    state.put(math.nan, 30)
    listed = state.items()
    state.put(1.0, None)
    state.remove(5.0)
    assert list(listed)[:2] == [(1.0, 10), (2.0, 20)]
    assert state.get(float("nan")) == 30
    assert 1.0 not in state
    assert float("-nan") in state
    assert list(state.values()) == [20, 30]
    assert next(state.keys()) == 2.0
    state.remove(2.0)
    state.remove(math.nan)
    assert list(state.items()) == []
    assert keyed.freeze() == []


class Mean:
    """An aggregate function: the mean."""

    def create_accumulator(self) -> dict[str, int]:
        return {"sum": 0, "count": 0}

    def add(self, value: int, accumulator: dict[str, int]) -> dict[str, int]:
        return {"sum": accumulator["sum"] + value, "count": accumulator["count"] + 1}

    def get_result(self, accumulator: dict[str, int]) -> float:
        return accumulator["sum"] / accumulator["count"]


def test_values_are_folded_for_each_key() -> None:
    """Only what was folded is kept and stored, and a key can begin anew."""
    keyed, again = Keyed(), Keyed()
    declared = (
        ReducingState("low", min, pa.int64()),
        AggregatingState("mean", Mean(), pa.struct({"sum": pa.int64(), "count": pa.int64()})),
    )
    low, mean = map(keyed.bind, declared)
    keyed.key("a")
    assert (low.get(), mean.get()) == (None, None)
    for value in (7, 3, 8):
        low.add(value)
        mean.add(value)
    keyed.key("b")
    low.add(9)
    low.clear()
    low.add(11)
    with pytest.raises(TypeError, match=r"'low' keeps int64, and was given .'x'."):
        low.add("x")
    restored_low, restored_mean = map(again.bind, declared)
    again.load(stored(keyed.freeze()))
    again.key("b")
    assert (restored_low.get(), restored_mean.get()) == (11, None)
    again.key("a")
    restored_low.add(5)
    restored_mean.add(2)
    assert (restored_low.get(), restored_mean.get()) == (3, 5.0)


@pytest.mark.parametrize(
    ("dtype", "given", "kept"),
    [
        (pa.int64(), -(2**63), -(2**63)),
        (pa.float32(), 0.1, 0.10000000149011612),
        (pa.float64(), 3, 3.0),
        (pa.timestamp("ms"), dt.datetime(2020, 1, 1, 0, 0, 0, 1000), dt.datetime(2020, 1, 1, 0, 0, 0, 1000)),
        (pa.string(), "ä", "ä"),
        (pa.struct({"a": pa.int64(), "b": pa.string()}), {"a": 1, "b": None}, {"a": 1, "b": None}),
        (pa.list_(pa.int32()), (1, 2), [1, 2]),
    ],
)
def test_a_value_is_of_the_declared_type_at_once(dtype: pa.DataType, given: object, kept: object) -> None:
    """As it would come back from a checkpoint: a restored job computes with the same values."""
    keyed = Keyed()
    state = keyed.bind(ValueState("v", dtype))
    keyed.key("a")
    state.update(given)
    assert kept == state.value()
    (table,) = stored(keyed.freeze())
    assert table.rows.schema.field("v").type == dtype
    assert [kept] == table.rows.column("v").to_pylist()


@pytest.mark.parametrize(
    ("dtype", "value"), [(pa.int64(), 2**63), (pa.int64(), 1.5), (pa.int8(), 128), (pa.string(), 1), (pa.bool_(), "x")]
)
def test_a_value_of_another_type_is_refused(dtype: pa.DataType, value: object) -> None:
    """When it is put in, where the user's code is to blame; what was kept before stays."""
    keyed = Keyed()
    state, items = keyed.bind(ValueState("v", dtype)), keyed.bind(ListState("xs", dtype))
    keyed.key("a")
    with pytest.raises(TypeError, match=f"'v' keeps {dtype}, and was given"):
        state.update(value)
    with pytest.raises(TypeError, match="'xs' keeps"):
        items.add(value)
    with pytest.raises(TypeError, match="'xs' keeps"):
        items.add(None)
    assert items.get() == []
    assert state.value() is None


def test_a_nested_value_changes_only_when_it_is_put_in() -> None:
    """What a function does to a dict that it was handed, or has handed in, is its own affair."""
    keyed = Keyed()
    dtype = pa.list_(pa.int64())
    state, items = keyed.bind(ValueState("v", dtype)), keyed.bind(ListState("xs", dtype))
    entries = keyed.bind(MapState("m", pa.string(), dtype))
    keyed.key("a")
    given = [1]
    state.update(given)
    items.add(given)
    entries.put("e", given)
    for changed in (given, state.value(), items.get()[0], entries.get("e"), next(entries.values())):
        changed.append(2)
    assert [state.value(), items.get(), entries.get("e")] == [[1], [[1]], [1]]


def test_a_snapshot_does_not_change() -> None:
    """Whatever happens to a key between the synchronous part and the asynchronous one, and it is seen by the next."""
    keyed = Keyed()
    value = keyed.bind(ValueState("v", pa.int64()))
    items, entries = keyed.bind(ListState("xs", pa.int64())), keyed.bind(MapState("m", pa.string(), pa.int64()))
    for key in ("a", "b"):
        keyed.key(key)
        value.update(1)
        items.add(1)
        entries.put("e", 1)
    first = keyed.freeze()
    keyed.key("a")
    value.update(2)
    items.add(2)
    entries.put("e", 2)
    entries.put("f", 2)
    second = keyed.freeze()
    keyed.key("a")
    items.add(3)
    entries.remove("e")
    keyed.key("b")
    value.clear()
    items.clear()
    entries.clear()

    assert rows_of(first) == {
        "v": {"a": 1, "b": 1},
        "xs": {"a": [1], "b": [1]},
        "m": {"a": [("e", 1)], "b": [("e", 1)]},
    }
    assert rows_of(second) == {
        "v": {"a": 2, "b": 1},
        "xs": {"a": [1, 2], "b": [1]},
        "m": {"a": [("e", 2), ("f", 2)], "b": [("e", 1)]},
    }
    assert rows_of(keyed.freeze()) == {"v": {"a": 2}, "xs": {"a": [1, 2, 3]}, "m": {"a": [("f", 2)]}}


def test_what_does_not_fit_is_not_loaded() -> None:
    """Another type, a key twice, and a state that nobody binds: each would lose or mix up state silently."""
    keyed = Keyed()
    keyed.bind(ValueState("v", pa.int64()))
    with pytest.raises(ConfigurationError, match=r"(?s)state 'v' of operator 'op-uid'.*string.*int64"):
        keyed.load([table(pa.record_batch({"k": ["a"], "v": ["x"]}))])
    with pytest.raises(IncompatibleStateError, match=r"state 'v' have columns \['k', 'w'\], not"):
        keyed.load([table(pa.record_batch({"k": ["a"], "w": [1]}))])
    with pytest.raises(CorruptionError, match=r"'v' holds a key twice"):
        keyed.load([table(pa.record_batch({"k": ["a", "a"], "v": [1, 2]}))])
    with pytest.raises(ConfigurationError, match=r"a state 'w' that the function does not bind"):
        keyed.load([table(pa.record_batch({"k": ["a"], "w": [1]}), "w")])


def test_a_map_finds_its_keys_after_a_restore() -> None:
    """Also NaN, which is not equal to itself."""
    keyed, again = Keyed(), Keyed()
    declared = MapState("m", pa.float64(), pa.string())
    state, restored = keyed.bind(declared), again.bind(declared)
    keyed.key("a")
    state.put_all({math.nan: "nan", 1.5: "x"})
    again.load(stored(keyed.freeze()))
    again.key("a")

    assert (restored.get(math.nan), restored.get(1.5)) == ("nan", "x")


def test_declarations_are_checked() -> None:
    """A state needs a name, and keys of a map must be plain."""
    with pytest.raises(ConfigurationError, match="needs a name"):
        ListState("", pa.int64())
    with pytest.raises(ConfigurationError, match=r"keys of a map cannot be .*; declare a plain type"):
        MapState("m", pa.list_(pa.int64()), pa.int64())

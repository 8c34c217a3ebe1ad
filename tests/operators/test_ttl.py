"""Time to live: state is forgotten when its time is over, to the millisecond, through restores, and never before."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from state_harness import COLUMNAR, WHOLE, Keyed, rows_of, stored, table

from tidegate.operators.state.keyed_state import (
    AggregatingState,
    KeyedState,
    ListState,
    MapState,
    ReducingState,
    ValueState,
)
from tidegate.operators.state.state_types import SERIALIZER_KEY, Pickled
from tidegate.operators.state.ttl import StateTtl
from tidegate.state.common.options import StateBackendOptions
from tidegate.state.kernels.hashing import hash_columns
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.ids import CheckpointId
from tidegate.storage.state.snapshot import Cut

TTL = StateTtl(100)
ON_READ = StateTtl(100, update="on_read_and_write")
RETURNED = StateTtl(100, visibility="return_expired_if_not_cleaned_up")

OPTIONS = {
    "columnar": COLUMNAR,
    "incremental": StateBackendOptions(incremental=True),
    "rocksdb": StateBackendOptions(kind="rocksdb"),
}

MakeKeyed = Callable[..., Keyed]


@pytest.fixture(params=sorted(OPTIONS))
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeKeyed]:
    """Makes the states of an operator on some backend."""
    made: list[Keyed] = []

    def made_keyed(now_ms: int = 0) -> Keyed:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(Keyed(replace(OPTIONS[request.param], directory=str(folder)), now_ms))
        return made[-1]

    yield made_keyed
    for keyed in made:
        keyed.states.close()


def at(keyed: Keyed, now_ms: int, key: str = "a") -> None:
    """Work on a key at a moment."""
    keyed.time.now_ms = now_ms
    keyed.key(key)


def test_a_value_lives_from_its_last_write(make: MakeKeyed) -> None:
    """Reading it changes nothing; at the very millisecond it is gone; another key has its own time."""
    keyed = make()
    state = keyed.bind(ValueState("v", int, ttl=TTL))
    at(keyed, 0)
    state.update(1)
    at(keyed, 50, "b")
    state.update(2)
    at(keyed, 60)
    state.update(3)
    at(keyed, 149, "b")
    assert state.value() == 2
    at(keyed, 150, "b")
    assert state.value() is None
    at(keyed, 159)
    assert state.value() == 3
    at(keyed, 160)
    assert state.value() is None


def test_reading_may_prolong(make: MakeKeyed) -> None:
    """With `on_read_and_write`: of a list all elements that are left, of a map the entry that is read."""
    keyed = make()
    value = keyed.bind(ValueState("v", int, ttl=ON_READ))
    items = keyed.bind(ListState("xs", int, ttl=ON_READ))
    entries = keyed.bind(MapState("m", str, int, ttl=ON_READ))
    at(keyed, 0)
    value.update(1)
    items.add(1)
    entries.put_all({"e": 1, "f": 2})
    at(keyed, 90)
    assert (value.value(), items.get(), entries.get("e")) == (1, [1], 1)
    at(keyed, 180)
    assert (value.value(), items.get(), dict(entries.items())) == (1, [1], {"e": 1})
    at(keyed, 279)
    assert (value.value(), items.get(), "e" in entries) == (1, [1], True)
    at(keyed, 400)
    assert (value.value(), items.get(), "e" in entries) == (None, [], False)


def test_elements_and_entries_expire_one_by_one(make: MakeKeyed) -> None:
    """Each lives from when it was put in."""
    keyed = make()
    items, entries = keyed.bind(ListState("xs", int, ttl=TTL)), keyed.bind(MapState("m", str, int, ttl=TTL))
    for now_ms in (0, 40, 80):
        at(keyed, now_ms)
        items.add(now_ms)
        entries.put(str(now_ms), now_ms)
        entries.put("all", now_ms)
    at(keyed, 120)
    assert items.get() == [40, 80]
    assert dict(entries.items()) == {"40": 40, "80": 80, "all": 80}
    assert sorted(entries.keys()) == ["40", "80", "all"]
    items.update([7])
    at(keyed, 179)
    assert items.get() == [7]
    assert dict(entries.items()) == {"80": 80, "all": 80}
    at(keyed, 220)
    assert items.get() == []
    assert list(entries.values()) == []
    items.add(8)
    entries.put("new", 8)
    assert (items.get(), dict(entries.items())) == ([8], {"new": 8})


def test_what_has_expired_may_be_returned_once(make: MakeKeyed) -> None:
    """With `return_expired_if_not_cleaned_up`, as in Flink: whoever finds it has cleaned it up."""
    keyed = make()
    value, items = keyed.bind(ValueState("v", int, ttl=RETURNED)), keyed.bind(ListState("xs", int, ttl=RETURNED))
    entries = keyed.bind(MapState("m", str, int, ttl=RETURNED))
    at(keyed, 0)
    value.update(1)
    items.add(1)
    entries.put("e", 1)
    at(keyed, 500)
    assert (value.value(), items.get(), dict(entries.items())) == (1, [1], {"e": 1})
    assert (value.value(), items.get(), dict(entries.items())) == (None, [], {})


def test_folded_state_begins_anew(make: MakeKeyed) -> None:
    """A reducing or aggregating state that has expired knows nothing of what was added; adding prolongs it."""

    class Sum:
        def create_accumulator(self) -> int:
            return 100

        def add(self, value: int, accumulator: int) -> int:
            return accumulator + value

        def get_result(self, accumulator: int) -> str:
            return str(accumulator)

    keyed = make()
    low = keyed.bind(ReducingState("low", min, int, ttl=TTL))
    total = keyed.bind(AggregatingState("sum", Sum(), int, ttl=TTL))
    for now_ms, value in ((0, 1), (60, 5), (120, 3)):
        at(keyed, now_ms)
        low.add(value)
        total.add(value)
    assert (low.get(), total.get()) == (1, "109")
    at(keyed, 220)
    assert (low.get(), total.get()) == (None, None)
    low.add(4)
    total.add(4)
    assert (low.get(), total.get()) == (4, "104")


def test_whole_snapshots_leave_out_what_has_expired(make: MakeKeyed) -> None:
    """Keys, elements and entries; what is left is what was written, with its moment."""
    keyed = make()
    states: tuple[KeyedState, ...] = (
        ValueState("v", int, ttl=TTL),
        ListState("xs", int, ttl=TTL),
        MapState("m", str, list[int], ttl=TTL),
        ValueState("for ever", int),
    )
    value, items, entries, forever = map(keyed.bind, states)
    for number in range(20):
        at(keyed, 10 * number, f"k{number % 10}")
        value.update(number)
        items.add(number)
        entries.put(str(number), [number])
        forever.update(number)
    at(keyed, 230)
    frozen = rows_of(keyed.freeze(replace(WHOLE, canonical=True)))

    left = range(14, 20)
    assert frozen["v"] == {f"k{n - 10}": {"value": n, "updated_ms": 10 * n} for n in left}
    assert frozen["xs"] == {f"k{n - 10}": [{"value": n, "updated_ms": 10 * n}] for n in left}
    assert frozen["m"] == {f"k{n - 10}": [(str(n), {"value": [n], "updated_ms": 10 * n})] for n in left}
    for state in keyed.freeze(replace(WHOLE, checkpoint_id=CheckpointId(2), canonical=True)):
        for chunk in state.chunks():
            groups = hash_columns(chunk.rows, ["k"]) % np.uint64(8)
            counts = np.bincount(groups.astype(np.int64) - chunk.first_group, minlength=len(chunk.group_rows) - 1)
            assert [0, *np.cumsum(counts)] == list(chunk.group_rows), "rows are not where their key groups are"
    assert frozen["for ever"] == {f"k{n - 10}": n for n in range(10, 20)}


def test_a_sweep_forgets_what_nobody_asks_for(make: MakeKeyed) -> None:
    """After each batch as many keys are looked at as it had rows: memory of keys that never come again is freed."""
    keyed = make()
    value, items = keyed.bind(ValueState("v", int, ttl=TTL)), keyed.bind(ListState("xs", int, ttl=TTL))
    for number in range(40):
        at(keyed, number, f"k{number}")
        value.update(number)
        items.add(number)
    for _ in range(2):  # a round may have begun in the middle
        at(keyed, 119, "other")
        keyed.leave(swept=1000)

    for state in ("v", "xs"):
        held = [key for batch in keyed.states.backend.keys(state, 100) for key in batch.column("k").to_pylist()]
        assert sorted(held) == sorted(f"k{n}" for n in range(20, 40))


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 60), st.sampled_from("abc"), st.sampled_from(["write", "read", "sweep", "restore"])),
        max_size=40,
    ),
    ttl=st.sampled_from([TTL, ON_READ]),
)
@pytest.mark.parametrize("incremental", [False, True])
def test_time_to_live_is_that_of_a_model(incremental: bool, steps: list[tuple[int, str, str]], ttl: StateTtl) -> None:
    """Whatever is swept and restored meanwhile: of each key is seen what was written less than its time ago."""
    options = StateBackendOptions(incremental=incremental)
    states = (ValueState("v", int, ttl=ttl), ListState("xs", int, ttl=ttl), MapState("m", int, int, ttl=ttl))
    now_ms, prolongs = 0, ttl is ON_READ
    model: dict[str, tuple[dict[int, int], dict[int, int], dict[int, int]]] = {key: ({}, {}, {}) for key in "abc"}
    keyed = Keyed(options)
    value, items, entries = map(keyed.bind, states)
    for number, (passed_ms, key, what) in enumerate(steps):
        now_ms += passed_ms
        for written in model[key]:
            for each in [each for each, at_ms in written.items() if at_ms + 100 <= now_ms]:
                del written[each]
        at(keyed, now_ms, key)
        if what == "write":
            value.update(number)
            items.add(number)
            entries.put(number % 4, number)
            model[key][0].clear()
            model[key][2].pop(number % 4, None)
            for each, written in zip((number, number, number % 4), model[key], strict=True):
                written[each] = now_ms
        elif what == "read":
            assert [value.value() or 0] == (list(model[key][0]) or [0])
            assert items.get() == list(model[key][1])
            assert sorted(entries.keys()) == sorted(model[key][2])
            if prolongs:
                for written in model[key]:
                    written.update(dict.fromkeys(written, now_ms))
        elif what == "sweep":
            keyed.leave(swept=2)
        else:
            tables = stored(keyed.freeze(Cut(CheckpointId(number + 1))))
            keyed = Keyed(options, now_ms)
            value, items, entries = map(keyed.bind, states)
            keyed.load(tables)


def test_a_state_may_get_a_time_to_live() -> None:
    """What was stored without one lives from the restore on."""
    keyed, again = Keyed(), Keyed(now_ms=1000)
    before = keyed.bind(ValueState("v", int)), keyed.bind(ListState("xs", int)), keyed.bind(MapState("m", str, int))
    keyed.key("a")
    before[0].update(1)
    before[1].add_all([1, 2])
    before[2].put("e", 1)
    value, items = again.bind(ValueState("v", float, ttl=TTL)), again.bind(ListState("xs", int, ttl=TTL))
    entries = again.bind(MapState("m", str, int, ttl=TTL))
    tables = [one for one in stored(keyed.freeze()) if one.state != "v"]
    again.load([*tables, table(pa.record_batch({"k": ["a"], "v": pa.array([1], pa.float32())}))])
    at(again, 1099)
    assert (value.value(), items.get(), entries.get("e")) == (1.0, [1, 2], 1)
    at(again, 1100)
    assert (value.value(), items.get(), entries.get("e")) == (None, [], None)


@dataclass(frozen=True)
class Quote:
    """A value of a user, with the fields that tidegate stores for a value with a time to live."""

    value: int
    updated_ms: int


QUOTE = Quote(7, 3)


@pytest.mark.parametrize(("before", "after"), [(None, TTL), (TTL, TTL), (None, None)])
def test_fields_of_a_user_are_not_taken_for_a_time_to_live(before: StateTtl | None, after: StateTtl | None) -> None:
    """Whatever their names are: a restore gives them back, and a time to live is a matter of its own."""

    def bound(keyed: Keyed, ttl: StateTtl | None) -> tuple[ValueState, ListState, MapState]:
        return (
            keyed.bind(ValueState("v", Quote, ttl=ttl)),
            keyed.bind(ListState("xs", Quote, ttl=ttl)),
            keyed.bind(MapState("m", str, Quote, ttl=ttl)),
        )

    keyed, again = Keyed(), Keyed(now_ms=50)
    value, items, entries = bound(keyed, before)
    keyed.key("a")
    value.update(QUOTE)
    items.add(QUOTE)
    entries.put("e", QUOTE)
    value, items, entries = bound(again, after)
    again.load(stored(keyed.freeze()))
    at(again, 99)
    assert (value.value(), items.get(), entries.get("e")) == (QUOTE, [QUOTE], QUOTE)
    at(again, 149)
    kept = before is None
    assert (value.value(), items.get(), entries.get("e")) == ((QUOTE, [QUOTE], QUOTE) if kept else (None, [], None))


@pytest.mark.parametrize(
    ("declared", "one"),
    [
        (lambda ttl: ValueState("v", int, ttl=ttl), 1),
        (lambda ttl: MapState("v", str, int, ttl=ttl), 1),
        (lambda ttl: MapState("v", str, Quote, ttl=ttl), QUOTE),
    ],
)
def test_a_state_cannot_lose_its_time_to_live(declared: Callable[[StateTtl | None], Any], one: object) -> None:
    """Nobody knows then what of it has expired: refused, with advice. Another time is no other type."""
    keyed, again, longer = Keyed(), Keyed(), Keyed(now_ms=500)
    state = keyed.bind(declared(TTL))
    again.bind(declared(None))
    keyed.key("a")
    state.update(one) if isinstance(state, ValueState) else state.put("e", one)
    tables = stored(keyed.freeze())

    with pytest.raises(ConfigurationError, match=r"state 'v' was written with a time to live.*ttl="):
        again.load(tables)
    kept = longer.bind(declared(StateTtl("1h")))
    longer.load(tables)
    longer.key("a")
    assert (kept.value() if isinstance(kept, ValueState) else kept.get("e")) == one


def test_pickled_state_with_a_time_to_live_says_so() -> None:
    """The mark is on the field within the one that has the moment."""
    keyed = Keyed()
    state = keyed.bind(MapState("v", str, Pickled, ttl=TTL))
    keyed.key("a")
    state.put("e", {1})
    assert state.get("e") == {1}
    (one,) = stored(keyed.freeze())

    timed = one.rows.schema.field("v").type.item_type
    assert timed.field("value").metadata == {SERIALIZER_KEY: b"pickle"}


@pytest.mark.parametrize(
    ("declare", "text"),
    [
        (lambda: StateTtl("soon"), "StateTtl: cannot read 'soon'"),
        (lambda: StateTtl(0), "must be greater than 0"),
        (lambda: StateTtl(dt.timedelta(seconds=-1)), "is negative"),
        (
            lambda: StateTtl("1h", update="never"),
            "update='never' is unknown; give one of on_create_and_write",
        ),
        (
            lambda: StateTtl("1h", visibility="all"),
            "visibility='all' is unknown; give one of never_return_expired",
        ),
        (lambda: ValueState("v", int, ttl="1h"), r"state 'v': ttl is a tg.StateTtl\(\"1h\"\), not '1h'"),
    ],
)
def test_settings_are_checked(declare: Callable[[], object], text: str) -> None:
    """When they are made."""
    with pytest.raises(ConfigurationError, match=text):
        declare()


def test_a_time_to_live_reads_durations() -> None:
    """As settings do."""
    assert [StateTtl(ttl).ttl_ms for ttl in ("1h", dt.timedelta(minutes=1), 5)] == [3_600_000, 60_000, 5]

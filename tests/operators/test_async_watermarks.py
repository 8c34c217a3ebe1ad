"""Rows of `map_async` that are under way meet after a restore the watermarks that they would have met."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from frozen_tables import tables_of
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_harness import CUT, opened

from tidegate.operators.functions.async_map import IN_FLIGHT, WATERMARKS, Answer, AsyncFunction, AsyncMap, Call
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS
from tidegate.storage.state.snapshot import StateTable

Sent = list[list[int] | int]
"""Batches of rows, and watermarks."""
Judged = list[tuple[int, int]]
"""Rows, each with the watermark that it has met."""


def _never_called(row: Any) -> Any:
    raise AssertionError("tests answer themselves")


def _emits_nothing(rows: pa.RecordBatch) -> None:
    raise AssertionError("results come out with the answers")


class Life:
    """An operator of one attempt, and what comes out of it."""

    def __init__(
        self,
        restored: Sequence[StateTable] = (),
        ordered: bool = True,
        size: int | None = None,
        capacity: int = 100,
        waits_ms: int | None = None,
    ) -> None:
        self.told: Judged = []
        self.calls: list[Call] = []
        function = AsyncFunction(_never_called, capacity, 1_000, batch_size=size, batch_timeout_ms=waits_ms)
        self._operator = AsyncMap(function, ordered=ordered)
        self._reached_ms, self._by_row = MIN_WATERMARK_MS, size is None
        opened(self._operator, restored)
        self.calls += self._operator.take_calls()

    def take(self, *elements: list[int] | int) -> None:
        """Batches and watermarks come, and calls are made."""
        for element in elements:
            if isinstance(element, list):
                self._operator.process(pa.record_batch({"x": pa.array(element, pa.int64())}), lambda rows: None)
            elif self._operator.let_pass(element):
                self._reach(element)
            self.calls += self._operator.take_calls()

    def wait(self) -> None:
        """The clock goes on until no rows wait for a batch to be full."""
        due_ms = self._operator.next_processing_time_ms()
        if due_ms is not None:
            assert list(self._operator.on_processing_time(due_ms - 1, _emits_nothing)) == []
            assert self._operator.next_processing_time_ms() == due_ms, "not yet"
            assert list(self._operator.on_processing_time(due_ms, _emits_nothing)) == []
        self.calls += self._operator.take_calls()

    def answer(self, *places: int) -> None:
        """Answers come to these of the calls that were made."""
        answers = [Answer(call.number, self._result(call.rows)) for call in (self.calls[place] for place in places)]
        self.calls = [call for place, call in enumerate(self.calls) if place not in places]
        for item in self._operator.answered(answers):
            if isinstance(item, int):
                self._reach(item)
            else:
                self.told += [(x, self._reached_ms) for x in item.column("x").to_pylist()]
        self.calls += self._operator.take_calls()

    def answer_all(self) -> None:
        """Until none is missing."""
        while self.calls:
            self.answer(*range(len(self.calls)))

    def stored(self) -> list[StateTable]:
        """A snapshot of now."""
        snapshot = self._operator.snapshot(CUT)
        return [table for state in snapshot.states for table in tables_of(state)] if snapshot is not None else []

    def _result(self, rows: pa.RecordBatch) -> Any:
        return rows.to_pylist()[0] if self._by_row else rows

    @property
    def reached_ms(self) -> int:
        """The newest watermark that has come out."""
        return self._reached_ms

    def _reach(self, watermark_ms: int) -> None:
        assert watermark_ms >= self._reached_ms, "event time does not go back"
        self._reached_ms = watermark_ms


def judged(elements: Sent) -> Judged:
    """Each row, with the watermark before it."""
    reached_ms, found = MIN_WATERMARK_MS, Judged()
    for element in elements:
        if isinstance(element, int):
            reached_ms = element
        else:
            found += [(x, reached_ms) for x in element]
    return found


@st.composite
def sent(draw: st.DrawFn) -> Sent:
    """What comes to the operator: watermarks go on, and several may come in a row."""
    found, rows, watermark_ms = Sent(), 0, 0
    for step in draw(st.lists(st.integers(-4, 4).filter(bool), max_size=20)):
        if step > 0:
            found.append([*range(rows, rows + step)])
            rows += step
        else:
            watermark_ms -= step
            found.append(watermark_ms)
    return found


@given(elements=sent(), ordered=st.booleans(), size=st.sampled_from([None, 1, 3]), data=st.data())
@settings(max_examples=200, deadline=None)
def test_each_row_meets_the_watermark_that_it_would_have_met(
    elements: Sent, ordered: bool, size: int | None, data: st.DataObject
) -> None:
    """Whatever had been answered at each of several restores, and whether senders say again how far they are."""
    told, tables, place = Judged(), list[StateTable](), 0
    capacity = data.draw(st.integers(1, 9), label="capacity")
    for _ in range(data.draw(st.integers(0, 4), label="restores")):
        life = Life(tables, ordered, size, capacity)
        cut = data.draw(st.integers(place, len(elements)), label="cut")
        for element in begun_anew(elements[:cut], place, bool(tables) and data.draw(st.booleans(), label="silent")):
            life.take(element)
            for _ in range(data.draw(st.integers(0, 2), label="answers")):
                if life.calls:
                    numbers = st.sets(st.integers(0, len(life.calls) - 1))
                    life.answer(*data.draw(numbers, label="which"))
        told, tables, place = told + life.told, life.stored(), cut
    life = Life(tables, ordered, size, capacity)
    life.take(*begun_anew(elements, place, bool(tables) and data.draw(st.booleans(), label="silent")))
    life.answer_all()
    told += life.told
    assert (told if ordered else sorted(told)) == judged(elements)


@given(elements=sent(), ordered=st.booleans(), size=st.integers(1, 5), data=st.data())
@settings(max_examples=200, deadline=None)
def test_no_watermark_overtakes_rows_that_wait_for_a_batch_to_be_full(
    elements: Sent, ordered: bool, size: int, data: st.DataObject
) -> None:
    """Each row comes once, and meets no later watermark than it would have met, over restores and timeouts."""
    told, tables, place = Judged(), list[StateTable](), 0
    for _ in range(data.draw(st.integers(0, 3), label="restores") + 1):
        life = Life(tables, ordered, size, 2, waits_ms=1_000)
        cut = data.draw(st.integers(place, len(elements)), label="cut")
        for element in elements[place:cut]:
            life.take(element)
            assert all(call.rows.num_rows <= size for call in life.calls)
            if data.draw(st.booleans(), label="time goes on"):
                life.wait()
            if life.calls and data.draw(st.booleans(), label="an answer"):
                life.answer(data.draw(st.integers(0, len(life.calls) - 1), label="which"))
        told, tables, place = told + life.told, life.stored(), cut
    life = Life(tables, ordered, size, 2, waits_ms=1_000)
    life.take(*elements[place:], MAX_WATERMARK_MS)
    life.answer_all()
    told += life.told

    expected = judged(elements)
    told = told if ordered else sorted(told)
    assert [x for x, _ in told] == [x for x, _ in expected]
    assert all(reached_ms <= would_ms for (_, reached_ms), (_, would_ms) in zip(told, expected, strict=True))
    assert life.reached_ms == MAX_WATERMARK_MS


def test_rows_wait_until_a_batch_is_full_or_for_its_time() -> None:
    """Over batches and watermarks; after a restore the time begins anew."""
    life = Life(size=4, waits_ms=1_000)
    life.take([1, 2], 5, [3, 4, 5], 6)
    assert [call.rows["x"].to_pylist() for call in life.calls] == [[1, 2, 3, 4]]
    life.answer(0)
    assert (life.told, life.reached_ms) == ([(x, MIN_WATERMARK_MS) for x in (1, 2, 3, 4)], 5)

    restored = Life(life.stored(), size=4, waits_ms=1_000)
    assert restored.calls == []
    restored.wait()
    assert [call.rows["x"].to_pylist() for call in restored.calls] == [[5]]
    restored.answer(0)
    assert restored.reached_ms == 6


def begun_anew(elements: Sent, place: int, silent: bool) -> Sent:
    """What comes from a place on. The sender says first how far it is, unless rows wait that this was stored with."""
    before = [element for element in elements[:place] if isinstance(element, int)]
    return [*([] if silent else before[-1:]), *elements[place:]]


@pytest.mark.parametrize("ordered", [True, False])
def test_what_has_gone_on_and_what_lies_between_is_stored(ordered: bool) -> None:
    """First the watermark that went on last; of those with no row between them the last one."""
    life = Life(ordered=ordered)
    life.take([1], 4)
    life.answer(0)
    life.take([2, 3], 5, 6, [4], 7)

    rows, watermarks = life.stored()

    assert (rows.state, rows.rows.to_pydict()) == (IN_FLIGHT, {"x": [2, 3, 4]})
    assert watermarks.state == WATERMARKS
    assert watermarks.rows.to_pydict() == {"rows_before": [0, 2, 3], "watermark_ms": [4, 6, 7]}
    assert Life([rows, watermarks], ordered).stored() == [rows, watermarks], "they are stored again before any answer"


def test_no_call_has_rows_from_both_sides_of_a_watermark() -> None:
    """Batches are put together anew after a restore."""
    life = Life(size=5)
    life.take([1, 2], 4, [3], [4])

    restored = Life(life.stored(), size=5)

    assert [call.rows["x"].to_pylist() for call in restored.calls] == [[1, 2], [3, 4]]


def test_a_sender_that_begins_anew_takes_nothing_back() -> None:
    """As `assign_timestamps` in a task without a source: event time behind the operator stays where it was."""
    life = Life()
    life.take([1], 6, [2])
    restored = Life(life.stored())

    restored.take(3, [3])
    restored.answer_all()
    restored.take(4, [4])
    restored.answer_all()

    assert restored.told == [(1, MIN_WATERMARK_MS), (2, 6), (3, 6), (4, 6)]


@pytest.mark.parametrize("watermarks", [[], [MAX_WATERMARK_MS]])
def test_without_event_time_rows_alone_are_stored(watermarks: list[int]) -> None:
    """The end of event time comes again."""
    life = Life()
    life.take([1, 2], *watermarks)
    assert [table.state for table in life.stored()] == [IN_FLIGHT]


def test_an_older_checkpoint_has_rows_alone() -> None:
    """They are asked for again, and no watermark judges them before the next one comes."""
    life = Life()
    life.take(4, [1], 5, [2])
    restored = Life([table for table in life.stored() if table.state == IN_FLIGHT])

    restored.take(5, [3])
    restored.answer_all()

    assert restored.told == [(1, MIN_WATERMARK_MS), (2, MIN_WATERMARK_MS), (3, 5)]

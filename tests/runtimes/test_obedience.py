"""Which orders a worker's process carries out, in whatever order and however often they come."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray_fakes import FIRST, SINK, SOURCE, task_processes

from tidegate.actors.coordinator import events as co
from tidegate.actors.ray.task_deployment import DeployFence
from tidegate.storage.ids import AttemptNumber, Generation

SECOND, THIRD = AttemptNumber(1), AttemptNumber(2)
ONE, TWO = Generation(1), Generation(2)

said = st.tuples(st.sampled_from(["begin", "let go"]), st.integers(0, 5), st.integers(1, 3))


@given(st.lists(said, max_size=30))
def test_what_is_over_is_not_begun_again(orders: list[tuple[str, int, int]]) -> None:
    """Nothing that the process let go of, nothing earlier than what it was given, nothing twice by one coordinator."""
    obedience = DeployFence()
    over, newest = -1, 0
    begun: list[tuple[int, int]] = []
    for what, attempt, generation in orders:
        replaced = generation < newest
        newest = max(newest, generation)
        if what == "let go":
            left = obedience.stops((SINK,), AttemptNumber(attempt), Generation(generation))
            assert left == (() if replaced else (SINK,))
            over = over if replaced else max(over, attempt)
            continue
        due = not replaced and attempt > over and all((attempt, generation) > earlier for earlier in begun)
        begins = obedience.begins((SINK,), AttemptNumber(attempt), Generation(generation))
        assert begins == ((SINK,) if due else ())
        if due:
            begun.append((attempt, generation))
            assert obedience.given == {SINK: attempt}
    assert obedience.newest == newest


def test_one_that_was_replaced_can_neither_begin_nor_end_anything() -> None:
    """Its order to let go does not keep the next attempt from beginning either."""
    obedience = DeployFence()
    assert obedience.begins((SINK,), FIRST, TWO)
    assert not obedience.stops((SINK,), THIRD, ONE)
    assert not obedience.begins((SINK,), THIRD, ONE)
    assert obedience.begins((SINK,), SECOND, TWO)


def test_each_subtask_is_obeyed_for_itself() -> None:
    """An order for several begins those that may. The generation is one fence for all of them."""
    obedience = DeployFence()
    assert obedience.begins((SOURCE, SINK), FIRST, ONE) == (SOURCE, SINK)
    assert obedience.stops((SINK,), SECOND, ONE) == (SINK,)
    assert obedience.begins((SOURCE, SINK), SECOND, ONE) == (SOURCE,)
    assert obedience.begins((SOURCE, SINK), FIRST, TWO) == (), "a later attempt was given, or is let go of"
    assert obedience.begins((SOURCE, SINK), THIRD, TWO) == (SOURCE, SINK)
    assert obedience.given == {SOURCE: THIRD, SINK: THIRD}
    assert obedience.stops((SINK,), THIRD, ONE) == ()
    assert obedience.begins((SOURCE,), AttemptNumber(THIRD + 1), ONE) == (), "replaced for every subtask"


def test_an_order_to_begin_that_comes_after_the_one_to_let_go_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the process: a connection was broken, and the order was under way. A later attempt begins."""
    with task_processes(monkeypatch) as make:
        sink = make(SINK).start()
        sink.drop(SECOND)
        sink.actor.deploy(replace(sink.order, attempt=SECOND))
        sink.settle()
        assert sink.running is None
        assert not sink.over, "it has neither finished nor failed"
        sink.actor.deploy(replace(sink.order, attempt=THIRD))
        sink.await_report(co.TaskReady)

"""How many rows a turn gets: enough for throughput, few enough for barriers, and never on the way down for ever."""

from __future__ import annotations

import random

import pytest
from fixed_cost import FixedCost
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tidegate.actors.task.turn_pacer import REACH, ROWS_AT_FIRST, ROWS_UNLIMITED, TURN_MS_MAX, TurnPacer
from tidegate.operators.batch_rows import BatchRows, check_batch_rows, rows_of_a_turn
from tidegate.storage.errors import ConfigurationError

WHOLE_BATCH = 262_144
TURNS = 200
TURNS_TO_ADAPT = 60


def drive(
    pacer: TurnPacer, function: FixedCost, turns: int, seed: random.Random, batch_rows: int = WHOLE_BATCH
) -> float:
    """Take so many turns from batches of a size, as an input channel gives them; returns rows a ms."""
    rows_sum, ms_sum, left = 0, 0.0, batch_rows
    for _ in range(turns):
        rows = min(left, pacer.rows_max)
        left = left - rows or batch_rows
        ms = function.ms(rows, seed)
        pacer.took(rows, int(ms))
        rows_sum += rows
        ms_sum += ms
    return rows_sum / max(1e-9, ms_sum)


functions = st.builds(
    FixedCost,
    st.one_of(st.just(0.0), st.floats(0.1, 1_000)),
    st.one_of(st.just(0.0), st.floats(1e-6, 1.0), st.floats(-6, 0).map(lambda power: 10.0**power)),
    st.floats(0, 0.25),
)
CALL_OF_100_MS = FixedCost(100.0, 1e-5)


@settings(max_examples=40, deadline=None)
@given(functions, functions, st.sampled_from([WHOLE_BATCH, 65_536, 2_000, 50]), st.integers(0, 2**32))
@example(CALL_OF_100_MS, FixedCost(0.0, 0.01), WHOLE_BATCH, 1)
@example(FixedCost(0.0, 1.0), FixedCost(1_000.0, 0.0), WHOLE_BATCH, 2)
@example(FixedCost(1_000.0, 1.0, 0.2), FixedCost(99.0, 0.001, 0.2), WHOLE_BATCH, 3)
def test_throughput_is_that_of_the_best_size_and_becomes_so_again_after_a_change(
    before: FixedCost, after: FixedCost, batch_rows: int, seed: int
) -> None:
    """Within a fifth, whatever a call and a row cost, with noise, and also when both change on the way."""
    pacer, chance = TurnPacer(), random.Random(seed)
    assert drive(pacer, before, TURNS, chance, batch_rows) >= 0.8 * before.best_rows_a_ms(batch_rows)
    drive(pacer, after, TURNS_TO_ADAPT, chance, batch_rows)
    assert drive(pacer, after, TURNS, chance, batch_rows) >= 0.8 * after.best_rows_a_ms(batch_rows)


@pytest.mark.parametrize("slope_ms", [1e-4, 1e-2, 1.0])
def test_turns_of_what_has_no_fixed_cost_keep_the_limit(slope_ms: float) -> None:
    """There cutting helps: from a few turns on none takes much longer, and sizes do not fall far below it."""
    pacer, chance, function = TurnPacer(), random.Random(7), FixedCost(0.0, slope_ms, 0.1)
    drive(pacer, function, 20, chance)
    for _ in range(200):
        assert pacer.rows_max * slope_ms <= 1.3 * TURN_MS_MAX
        drive(pacer, function, 1, chance)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(TURN_MS_MAX, 30_000), min_size=1, max_size=100), st.integers(0, 2**32))
@example([915, 240, 1_254, 326, 553, 100], 1_574)
def test_durations_that_no_cut_changes_cannot_make_turns_small(durations_ms: list[int], seed: int) -> None:
    """Slow as they may be: whatever the size, the next turn takes as long. So sizes grow, from any state."""
    pacer, chance = TurnPacer(), random.Random(seed)
    for ms in durations_ms:
        pacer.took(min(pacer.rows_max, WHOLE_BATCH), ms)
    fixed = FixedCost(float(durations_ms[-1]), 0.0, 0.1)
    drive(pacer, fixed, TURNS_TO_ADAPT, chance)
    assert drive(pacer, fixed, TURNS, chance) >= 0.8 * fixed.best_rows_a_ms(WHOLE_BATCH)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40_000), st.integers(1, WHOLE_BATCH)), max_size=200), functions)
@example([(51, 2)], FixedCost(51.0, 0.0))
def test_whatever_durations_come_sizes_stay_in_bounds_and_find_back(
    turns: list[tuple[int, int]], function: FixedCost
) -> None:
    """A size follows from sizes that were tried, one step at a time; and nothing that was seen spoils what comes."""
    pacer, tried = TurnPacer(rows_max=1_000_000, rows_min=3), [ROWS_AT_FIRST]
    for ms, rows_there in turns:
        rows = min(rows_there, pacer.rows_max)
        pacer.took(rows, ms)
        tried.append(rows)
        assert max(3, min(tried) // REACH) <= pacer.rows_max <= min(1_000_000, max(tried) * REACH)
    chance = random.Random(11)
    drive(pacer, function, 2 * TURNS_TO_ADAPT, chance)
    assert drive(pacer, function, TURNS, chance) >= 0.8 * function.best_rows_a_ms(WHOLE_BATCH)


def test_one_pause_of_the_process_cuts_nothing() -> None:
    """A single turn out of line is tried again, and then forgotten."""
    pacer, chance, function = TurnPacer(), random.Random(3), FixedCost(1.0, 0.01)
    drive(pacer, function, 100, chance)
    size = pacer.rows_max
    pacer.took(size, 5_000)
    drive(pacer, function, 2, chance)
    assert pacer.rows_max == pytest.approx(size, rel=0.05)


def test_a_fast_operator_gets_whole_batches_soon() -> None:
    """From the first turns on, each is larger."""
    pacer = TurnPacer()
    for _ in range(8):
        pacer.took(min(pacer.rows_max, WHOLE_BATCH), 0)
    assert pacer.rows_max >= WHOLE_BATCH


def test_what_a_user_says_holds_whatever_calls_cost() -> None:
    """Neither below the least rows nor above the most."""
    pacer = TurnPacer(rows_max=500, rows_min=200)
    for ms in (0, 0, 10_000, 10_000, 10_000, 10_000, 0, 0):
        assert 200 <= pacer.rows_max <= 500
        pacer.took(pacer.rows_max, ms)


@pytest.mark.parametrize("given_rows", [5, (1,), (1, 2, 3), (0, 10), (20, 10), (1.0, 2), ("1", "2"), (True, 5), "12"])
def test_bounds_that_are_none_are_refused(given_rows: object) -> None:
    """At planning, with the operator's name."""
    with pytest.raises(ConfigurationError, match=r"score: .*batch_rows"):
        check_batch_rows("score", given_rows)


def test_chained_operators_share_a_turn() -> None:
    """It has the greatest of the least, and of the most the smallest that is not less than that."""
    assert rows_of_a_turn([None, None], ROWS_UNLIMITED) == BatchRows(1, ROWS_UNLIMITED)
    assert rows_of_a_turn([BatchRows(5, 100), None, BatchRows(20, 50)], ROWS_UNLIMITED) == BatchRows(20, 50)
    assert rows_of_a_turn([BatchRows(500, 900), BatchRows(1, 10)], ROWS_UNLIMITED) == BatchRows(500, 500)
    assert rows_of_a_turn([BatchRows(500, 900)], 2) == BatchRows(2, 2)

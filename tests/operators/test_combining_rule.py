"""`CombiningRule`: it follows what pays, settles, and never looks at much more than it must."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.operators.local_aggregation import (
    LOOKED_AT,
    OFF_AT,
    ON_AT,
    PAUSE_MAX,
    PAUSE_MIN,
    ROWS_MIN,
    CombiningRule,
)

_BATCHES = st.lists(st.tuples(st.integers(1, 40_000), st.floats(0.001, 1)), max_size=300)


def _played(rule: CombiningRule, batches: list[tuple[int, float]]) -> tuple[list[bool], list[bool]]:
    """For each batch: whether it was looked at, and what the rule is afterwards."""
    looked, combining = [], []
    for rows, share in batches:
        looks = rule.looks_at(rows)
        if looks:
            first = rule.rows_first(rows)
            if not (first and rule.gives_up(rows, max(1, round(share * first)))):
                rule.combines(rows, max(1, round(share * rows)))
        looked.append(looks)
        combining.append(rule.combining)
    return looked, combining


def _switches(combining: list[bool]) -> int:
    return sum(before != after for before, after in pairwise([False, *combining]))


@given(_BATCHES)
def test_it_switches_only_after_it_has_looked(batches: list[tuple[int, float]]) -> None:
    """Whatever comes: between two switches it has measured so many batches, so it cannot flap."""
    looked, combining = _played(CombiningRule("auto"), batches)
    assert _switches(combining) <= sum(looked) // LOOKED_AT
    changes = [i for i, (before, after) in enumerate(pairwise([False, *combining])) if before != after]
    assert all(sum(looked[a + 1 : b + 1]) >= LOOKED_AT for a, b in pairwise(changes))


@given(st.floats(0.001, 1), st.lists(st.integers(ROWS_MIN, 100_000), min_size=LOOKED_AT, max_size=100), st.booleans())
def test_a_steady_stream_settles(share: float, rows: list[int], begun: bool) -> None:
    """With the same share in all batches there is one switch at most, and in between the bounds none."""
    rule = CombiningRule("auto")
    rule.combining = begun
    _, combining = _played(rule, [(each, share) for each in rows])
    changes = _switches(combining) if not begun else sum(a != b for a, b in pairwise([True, *combining]))
    assert changes <= 1
    if ON_AT + 0.001 < share < OFF_AT - 0.001:
        assert combining[-1] == begun
    elif share < ON_AT - 0.001:
        assert combining[-1]
    elif share > OFF_AT + 0.001:
        assert not combining[-1]


@settings(max_examples=20)
@given(st.lists(st.floats(0.001, 1), min_size=1, max_size=4))
def test_what_it_measures_does_not_depend_on_what_it_decides(shares: list[float]) -> None:
    """Two rules with different pasts that look at the same batches come to the same: nothing builds up."""
    one, other = CombiningRule("auto"), CombiningRule("auto")
    other.combining = True
    steady = [(50_000, share) for share in shares for _ in range(LOOKED_AT * (PAUSE_MAX + 1))]
    ended = [_played(rule, steady)[1][-1] for rule in (one, other)]
    if not ON_AT - 0.001 < shares[-1] < OFF_AT + 0.001:
        assert ended[0] == ended[1]


def test_what_does_not_pay_is_looked_at_less_and_less() -> None:
    """Of many batches without repeated keys hardly any is grouped; and still it notices when they repeat."""
    rule = CombiningRule("auto")
    looked, combining = _played(rule, [(50_000, 1.0)] * 5_000)
    assert not any(combining)
    assert sum(looked[:PAUSE_MIN]) == 1
    assert sum(looked[-10 * PAUSE_MAX :]) <= 10
    _, combining = _played(rule, [(50_000, 0.01)] * (PAUSE_MAX + LOOKED_AT))
    assert combining[-1]


def test_a_count_is_over_when_it_can_come_to_nothing() -> None:
    """Half of the keys of a quarter of the rows are enough; a share that may still fall is counted to the end."""
    rule = CombiningRule("auto")
    assert rule.looks_at(100_000)
    assert rule.rows_first(100_000) == 25_000
    assert not rule.gives_up(100_000, 20_000)
    assert not rule.combines(100_000, 25_000)
    assert rule.looks_at(100_000)
    assert rule.gives_up(100_000, 20_001)
    assert [rule.looks_at(100_000) for _ in range(PAUSE_MIN + 1)] == [False] * PAUSE_MIN + [True]


def test_while_it_combines_batches_are_grouped_once() -> None:
    """There is nothing to learn from their first rows."""
    auto, on = CombiningRule("auto"), CombiningRule("on")
    auto.combining = True
    assert auto.rows_first(100_000) == on.rows_first(100_000) == 0


def test_small_batches_pass() -> None:
    """In mode auto; "on" combines them all, if a group has two rows, and "off" looks at nothing."""
    auto, on, off = (CombiningRule(mode) for mode in ("auto", "on", "off"))
    assert not auto.looks_at(ROWS_MIN - 1)
    assert on.looks_at(2)
    assert on.combines(2, 1)
    assert not on.combines(2, 2)
    assert not off.looks_at(100_000)

"""The predicates of a task, each just inside and just outside of what it allows."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tidegate.actors.task import invariants
from tidegate.actors.task.snapshots import SnapshotPart
from tidegate.storage.errors import InvariantError


@pytest.mark.parametrize(
    ("predicate", "inside", "outside"),
    [
        (invariants.is_gapless, [(0, 0), (4, 5), (5, 5)], [(6, 5), (1, 0)]),
        (invariants.are_contiguous, [(0, 0, 0), (3, 2, 5)], [(3, 2, 6), (3, 2, 4)]),
        (invariants.may_recover, [(0,)], [(1,)]),
        (invariants.may_process, [(False,)], [(True,)]),
        (invariants.may_send, [(0, 1), (9, 10)], [(10, 10), (11, 10), (0, 0)]),
        (invariants.is_full, [(10, 10), (11, 10), (0, 0)], [(9, 10)]),
        (invariants.may_hold, [(0, 2), (2, 2)], [(3, 2)]),
        (invariants.is_newer, [(1, 0), (8, 7)], [(7, 7), (6, 7)]),
        (invariants.may_acknowledge, [(set(), True)], [({SnapshotPart.STATE}, True), (set(), False)]),
        (
            invariants.may_leave,
            [(True, True, True)],
            [(False, True, True), (True, False, True), (True, True, False)],
        ),
    ],
)
def test_a_predicate_ends_where_it_says(
    predicate: Callable[..., bool], inside: list[tuple[object, ...]], outside: list[tuple[object, ...]]
) -> None:
    """The last value that is allowed is, and the first that is not is not."""
    assert [values for values in inside if not predicate(*values)] == []
    assert [values for values in outside if predicate(*values)] == []


@pytest.mark.parametrize(
    ("check", "inside", "outside", "number"),
    [
        (invariants.check_contiguous, (3, 2, 5), (3, 2, 6), 1),
        (invariants.check_process, (False,), (True,), 2),
        (invariants.check_newer, (8, 7), (7, 7), 2),
        (invariants.check_recover, (0,), (1,), 3),
        (invariants.check_hold, (2, 2), (3, 2), 10),
    ],
)
def test_what_is_broken_names_its_invariant(
    check: Callable[..., None], inside: tuple[object, ...], outside: tuple[object, ...], number: int
) -> None:
    """A check is silent where its predicate holds."""
    check(*inside)
    with pytest.raises(InvariantError, match=f"^invariant {number}: "):
        check(*outside)

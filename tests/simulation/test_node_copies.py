"""Copies of state on the disks of simulated nodes: tasks are restored only from right copies."""

from __future__ import annotations

import pytest
from broken import BROKEN, Break
from broken_copies import COPY_PATCHES, KEPT

A_SEED = 0


def test_tasks_are_restored_from_copies_of_which_some_are_wrong() -> None:
    """A wrong or missing copy is read from storage instead, so that all rows are right."""
    report = Break(5, fixed=KEPT).simulate(A_SEED)
    assert report.ok, report
    assert report.coverage["copy_restored"]


def test_a_node_takes_its_disk_along() -> None:
    """Tasks that it had start elsewhere, where there is no copy."""
    report = Break(5, fixed=KEPT | {"faults": "nodes"}).simulate(A_SEED)
    assert report.ok, report
    assert report.coverage["node_lost"]


@pytest.mark.parametrize("rule", COPY_PATCHES)
def test_a_rule_of_copies_that_is_broken_is_found_out(rule: str) -> None:
    """In the seed that is fine otherwise."""
    assert BROKEN[rule].simulate(A_SEED).violation is not None

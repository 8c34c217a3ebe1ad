"""Fixtures of all tests of the simulator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tidegate.cli.seed_runs import quiet


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Silences the log, because simulated faults are expected."""
    with quiet():
        yield

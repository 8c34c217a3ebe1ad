"""What every test of the simulator shares."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tidegate.cli.seed_runs import quiet


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Simulated faults are no news."""
    with quiet():
        yield

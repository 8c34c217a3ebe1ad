"""What holds for all tests of commands."""

from __future__ import annotations

import pytest

from tidegate.actors.drivers import coordinator_driver


@pytest.fixture(autouse=True)
def logged_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator logs soon what nothing follows from: tests wait for it, and it would wait a second for others."""
    monkeypatch.setattr(coordinator_driver, "HOLD_MS", 10)

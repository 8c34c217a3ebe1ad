"""What holds for all tests of the public API."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tidegate.actors.drivers import coordinator_driver

if TYPE_CHECKING:
    from fake_queries import Streaming


@pytest.fixture(autouse=True)
def logged_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator logs soon what nothing follows from: tests wait for it, and it would wait a second for others."""
    monkeypatch.setattr(coordinator_driver, "HOLD_MS", 10)


@pytest.fixture
def streaming(tmp_path: Path) -> Iterator[Streaming]:
    """A program over a stream with two batches, whose queries need no Spark."""
    from fake_queries import Streaming, without_spark

    program = Streaming(tmp_path)
    program.stream.put([1, 2, 3], [4, 5])
    program.stream.put([6])
    with without_spark():
        yield program

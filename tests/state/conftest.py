"""A fixture of the tests of the backend in memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tidegate.state.columnar import key_space
from tidegate.state.columnar import paged_state as frozen
from tidegate.state.kernels.paged import PAGE_ROWS


@pytest.fixture
def small_blocks() -> Iterator[None]:
    """A block is a page, and a chunk a few rows, so that a few thousand keys are many of both."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (key_space, frozen):
            patch.setattr(module, "BLOCK_ROWS", PAGE_ROWS)
        patch.setattr(frozen, "CHUNK_ROWS_MIN", 100)
        patch.setattr(frozen, "CHUNK_BYTES_MIN", 0)
        yield

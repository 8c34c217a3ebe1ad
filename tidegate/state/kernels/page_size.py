"""How many values a page of a column holds (`paged.py`)."""

from __future__ import annotations

PAGE_BITS = 12
PAGE_ROWS = 1 << PAGE_BITS

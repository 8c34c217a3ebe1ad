"""Size of a page of a column (`paged.py`): compiled into machine code, and readable without importing the compiler."""

from __future__ import annotations

PAGE_BITS = 12
PAGE_ROWS = 1 << PAGE_BITS

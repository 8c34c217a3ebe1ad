"""The number of values in a memory page of a column (`paged.py`). It is compiled into machine code. This module can be
read without importing the compiler.
"""

from __future__ import annotations

PAGE_BITS = 12
PAGE_ROWS = 1 << PAGE_BITS

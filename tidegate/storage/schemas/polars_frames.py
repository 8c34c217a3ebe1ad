"""Tells polars frames from other values, without loading polars.

A process of a job loads polars, which takes a quarter of a second, only if the job's functions or expressions use it.
Nobody can give us a frame who has not loaded it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import polars as pl
    from typing_extensions import TypeIs


def is_polars_frame(value: object) -> TypeIs[pl.DataFrame]:
    """Whether a value is a polars DataFrame."""
    polars = sys.modules.get("polars")
    return polars is not None and isinstance(value, polars.DataFrame)

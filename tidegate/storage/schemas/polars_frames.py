"""Tells polars frames and expressions from other values, without loading polars.

A driver or a process of a job loads polars, which takes a quarter of a second, only if the job's functions or
expressions use it. Nobody can give us a frame or an expression who has not loaded it.
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


def is_polars_expression(value: object) -> TypeIs[pl.Expr]:
    """Whether a value is a polars expression."""
    polars = sys.modules.get("polars")
    return polars is not None and isinstance(value, polars.Expr)

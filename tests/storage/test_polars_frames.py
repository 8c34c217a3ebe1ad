"""What polars and Arrow can hold of each other is known before a value is lost, and named by column."""

from __future__ import annotations

import polars as pl
import pyarrow as pa
import pytest

from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.polars_frames import arrow_of, in_zones_of_polars, polars_has

ZONES = [None, "UTC", "Europe/Berlin", "+00:00", "+05:30", "-03:00", "-12:00", "-13:00", "+14:00", "+15:00", "GMT+1"]


@pytest.mark.parametrize("zone", ZONES)
def test_zones_are_those_that_polars_takes(zone: str | None) -> None:
    """Polars itself raises an error for the others, or panics."""
    kind = pa.timestamp("us", zone)
    try:
        pl.from_arrow(pa.array([0], kind))
        taken = True
    except pl.exceptions.ComputeError:
        taken = False
    assert polars_has(kind) == taken
    column = pa.array([[{"t": 0}]], pa.list_(pa.struct([("t", kind)])))
    found = column.cast(in_zones_of_polars(column.type))
    assert pl.Series(pl.from_arrow(found))[0][0]["t"].timestamp() == 0 if zone else True


@pytest.mark.parametrize(
    ("column", "lacking"),
    [
        (pl.Series([object()], dtype=pl.Object), "Object"),
        (pl.Series([1], dtype=pl.Int128), "Int128"),
        (pl.Series([1], dtype=pl.UInt128), "UInt128"),
        (pl.Series([[1]], dtype=pl.List(pl.Int128)), "Int128"),
        (pl.Series([{"a": 1}], dtype=pl.Struct({"a": pl.Int128})), "Int128"),
    ],
)
def test_columns_that_arrow_lacks_are_refused_by_name(column: pl.Series, lacking: str) -> None:
    """Polars would hand out addresses of memory for objects."""
    with pytest.raises(ConfigurationError, match=rf"column 'x' is .*Arrow has no type for {lacking}; cast it"):
        arrow_of(pl.DataFrame({"y": [1], "x": column}))

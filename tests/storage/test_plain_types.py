"""Types without views are left as they are, to the last promise."""

from __future__ import annotations

import pyarrow as pa
import pytest

from tidegate.storage.schemas.arrow_types import holds_views, without_views

FULL = pa.field("value", pa.int64(), nullable=False)
POINT = pa.struct([pa.field("x", pa.int64(), nullable=False)])


@pytest.mark.parametrize(
    "data_type",
    [
        pa.map_(pa.string(), FULL),
        pa.map_(pa.string(), pa.int64(), keys_sorted=True),
        pa.map_(pa.string(), pa.field("points", pa.list_(POINT), nullable=False)),
        pa.map_(pa.field("k", POINT, nullable=False), pa.string()),
        pa.list_(pa.map_(pa.string(), FULL)),
        pa.list_(FULL, 3),
        pa.large_list(FULL),
    ],
)
def test_types_without_views_stay(data_type: pa.DataType) -> None:
    """Maps without nulls, with sorted keys, or with other names of their fields are no views."""
    assert not holds_views(data_type)
    assert without_views(data_type).equals(data_type, check_metadata=True)


def test_views_in_maps_are_found() -> None:
    """The rest of the map stays as it is."""
    found = without_views(pa.map_(pa.string(), pa.field("value", pa.string_view(), nullable=False), keys_sorted=True))
    assert found == pa.map_(pa.string(), pa.field("value", pa.large_string(), nullable=False), keys_sorted=True)

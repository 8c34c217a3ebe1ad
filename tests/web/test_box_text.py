"""`wrap`: a name as lines of a box."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.web.page.graph import ELLIPSIS, width_em, wrap


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", []),
        ("orders", ["orders"]),
        ("read orders -> parse", ["read orders", "-> parse"]),
        ("read_orders_of_all_shops", ["read_orders_", "of_all_shops"]),
        ("read_orders_of_all_the_shops", ["read_orders_", "of_all_the_s…"]),
        ("parse->check->count_all", ["parse->", "check->cou…"]),
        ("顧客別の合計金額を計算する", ["顧客別の合計金", "額を計算する"]),
    ],
)
def test_lines_break_between_words(text: str, lines: list[str]) -> None:
    """Behind spaces, underscores, hyphens and arrows, and anywhere in a long word."""
    assert wrap(text, (8.0, 8.0)) == lines


@given(st.text(max_size=60), st.lists(st.floats(2.0, 20.0), min_size=1, max_size=3))
def test_no_line_is_wider_than_its_place(text: str, widths: list[float]) -> None:
    """Lines together are the text, or its beginning with an ellipsis."""
    lines = wrap(text, widths)
    assert len(lines) <= len(widths)
    assert all(width_em(line) <= width for line, width in zip(lines, widths, strict=False))
    shown = "".join("".join(lines).split())
    whole = "".join(text.split())
    assert shown == whole or whole.startswith(shown.removesuffix(ELLIPSIS))

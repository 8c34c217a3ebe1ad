"""The pages of docs/reference are what the docstrings make of them."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT


@pytest.fixture(scope="module")
def script() -> Any:
    """`scripts/reference_pages.py` as a module."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        return import_module("reference_pages")
    finally:
        sys.path.remove(str(ROOT / "scripts"))


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "reference").glob("*.md")), ids=lambda path: path.name)
def test_pages_show_the_docstrings_of_today(script: Any, path: Path) -> None:
    """Otherwise run `python scripts/reference_pages.py`."""
    text = path.read_text()
    assert text == script.page(text), f"{path.name} is out of date: python scripts/reference_pages.py"


def test_a_class_is_shown_with_what_is_public_of_it(script: Any) -> None:
    """Signatures without self, docstrings, properties, fields; nothing that begins with an underscore."""
    text = script.entry("tidegate.OutputTable")
    assert text.startswith("<!-- reference: tidegate.OutputTable -->\n## OutputTable\n\n```\nclass OutputTable\n```\n")
    assert "\n### OutputTable.to_arrow\n\n```\nto_arrow(" in text
    assert "self" not in text.split("```")[3]
    assert "._" not in text
    limits = script.entry("tidegate.DataPlaneOptions")
    assert "\n- `source_rows_max: int" in limits


def test_a_constant_has_the_text_below_it(script: Any) -> None:
    """It is in the module that defines it."""
    assert script.entry("tidegate.MAX_WATERMARK_MS").count("\n") > 6

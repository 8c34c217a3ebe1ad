"""The documentation site has a place for each page and for each public name."""

from __future__ import annotations

import re
import runpy
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import yaml
from repository import ROOT

DOCS = ROOT / "docs"
SETTINGS = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
PAGES = runpy.run_path(str(ROOT / "scripts" / "site_hooks.py"))["PAGES"]
FACES = ("tidegate", "tidegate.recovery", "tidegate.testing")


def pages_of(nav: Any) -> Iterator[str]:
    """The pages of a part of the navigation."""
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from pages_of(part)


def test_each_page_has_one_place_in_the_navigation() -> None:
    """A new page of docs/ needs a line under `nav` in mkdocs.yml, where a newcomer looks for it."""
    placed = Counter(pages_of(SETTINGS["nav"]))
    there = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")} | set(PAGES.values())
    listed = {page for page in there if re.match(r"decisions/0\d+-", page)}
    assert sorted(there - listed - placed.keys()) == [], "not in the navigation: add them to `nav` in mkdocs.yml"
    assert sorted(placed.keys() - there) == [], "in the navigation, and not there: remove them from mkdocs.yml"
    assert [page for page, times in placed.items() if times > 1] == []


def test_each_public_name_is_in_the_reference() -> None:
    """Once, under the name by which it is imported."""
    text = "\n".join(path.read_text() for path in sorted((DOCS / "reference").glob("*.md")))
    shown = Counter(re.findall(r"^::: (\S+)$", text, re.MULTILINE))
    public = {f"{face}.{name}" for face in FACES for name in import_module(face).__all__}
    # It is the same class, and lies in both.
    public.remove("tidegate.recovery.RestartStrategy")
    assert sorted(public - shown.keys()) == [], "not in the reference: add them to a page of docs/reference"
    assert sorted(shown.keys() - public) == []
    assert [name for name, times in shown.items() if times > 1] == []

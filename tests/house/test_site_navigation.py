"""The documentation site has a place for each page and for each public name."""

from __future__ import annotations

import re
import runpy
from collections import Counter
from importlib import import_module

import yaml
from repository import ROOT

DOCS = ROOT / "docs"
SETTINGS = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
HOOKS = runpy.run_path(str(ROOT / "scripts" / "site_hooks.py"))
FACES = ("tidegate", "tidegate.recovery", "tidegate.testing")


def test_each_page_has_one_place_in_the_navigation() -> None:
    """Those of docs/ that mkdocs.yml does not name are added at its end; decisions have a list of their own."""
    there = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")} | set(HOOKS["PAGES"].values())
    placed = Counter(HOOKS["pages_of"](HOOKS["with_all_pages"](SETTINGS["nav"], there)))
    assert {page for page in there - placed.keys() if not page.startswith("decisions/0")} == set()
    assert sorted(placed.keys() - there) == [], "in the navigation, and not there: remove them from mkdocs.yml"
    assert [page for page, times in placed.items() if times > 1] == []


def test_a_page_that_is_not_named_stands_at_the_end() -> None:
    """However deep the others are; a navigation that is complete stays as it is."""
    nav = [{"Start": ["a.md", {"More of it": [{"B": "b.md"}]}]}]
    added = HOOKS["with_all_pages"](nav, ["b.md", "d/c.md", "a.md", "decisions/0001-x.md", "b2.md"])
    assert added == [*nav, {"More": ["b2.md", "d/c.md"]}]
    assert HOOKS["with_all_pages"](nav, ["a.md", "b.md"]) == nav


def test_each_public_name_is_in_the_reference() -> None:
    """Once, under the name by which it is imported."""
    text = "\n".join(path.read_text() for path in sorted((DOCS / "reference").glob("*.md")))
    shown = Counter(re.findall(r"^<!-- reference: (\S+) -->$", text, re.MULTILINE))
    public = {f"{face}.{name}" for face in FACES for name in import_module(face).__all__}
    # It is the same class, and lies in both.
    public.remove("tidegate.recovery.RestartStrategy")
    assert sorted(public - shown.keys()) == [], "add marks to docs/reference, run scripts/reference_pages.py"
    assert sorted(shown.keys() - public) == []
    assert [name for name, times in shown.items() if times > 1] == []

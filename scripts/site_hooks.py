"""What the documentation site is made of besides docs/, and how links of the repository become links of the site.

`mkdocs` calls the functions that begin with `on_` (`hooks` in mkdocs.yml). Rules:

- README.md is the first page; CONTRIBUTING.md, CHANGELOG.md and benchmarks/README.md are pages too.
- Pages link to each other by paths of the repository, as its readers follow them. A link to a page becomes one to its
  place in the site; a file that is no page goes along, below `repository/`. A link that leads nowhere is left alone:
  the strict build refuses it.
- A page of docs/ that the navigation does not name stands at its end, under "More". Decisions are found by their list.
- Anchors are made of headings as the hosts of repositories make them, so that a link works in both places.
- Comments are for tests and stay out.
"""

from __future__ import annotations

import os
import posixpath
import re
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
}
"""Pages that lie elsewhere than in docs/, and what they are called in the site."""

FILES = ("LICENSE", "examples/*.py", "examples/*.ipynb", "configs/*.yaml", "configs/**/*.yaml", "configs/**/*.json")
"""What pages link to and is no page."""

_LINK = re.compile(r"(?P<text>\]\()(?P<path>(?!\w+:|#)[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")
_FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2 *$", re.DOTALL | re.MULTILINE)
_COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)


def anchor_of(heading: str, separator: str = "-") -> str:
    """The anchor of a heading: in small letters, without punctuation, each space a hyphen."""
    plain = unicodedata.normalize("NFC", re.sub(r"<[^>]*>", "", heading)).strip().lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", separator)


def place_in_site(path: str) -> str | None:
    """Where a file of the repository is in the site. None if it is not there."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/"):
        found = path.removeprefix("docs/")
        return f"{found}/README.md" if (ROOT / path).is_dir() else found
    return f"repository/{path}" if path in files() else None


def files() -> list[str]:
    """The files that go along."""
    return sorted({str(path.relative_to(ROOT)) for pattern in FILES for path in ROOT.glob(pattern)})


def place_in_repository(page: str) -> str:
    """Where a page of the site lies."""
    return next((path for path, name in PAGES.items() if name == page), f"docs/{page}")


def for_site(markdown: str, page: str) -> str:
    """A page without comments, with links from its place in the site. What is in code stays as it is."""
    folder = posixpath.dirname(place_in_repository(page))

    def linked(found: re.Match[str]) -> str:
        place = place_in_site(posixpath.normpath(posixpath.join(folder, found["path"])))
        if place is None:
            return found[0]
        return f"]({posixpath.relpath(place, posixpath.dirname(page) or '.')}{found['anchor'] or ''})"

    parts, end = [], 0
    text = _COMMENT.sub("", markdown)
    for fence in _FENCE.finditer(text):
        parts += [_LINK.sub(linked, text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, _LINK.sub(linked, text[end:])])


def pages_of(nav: Any) -> Iterator[str]:
    """The pages of a part of the navigation."""
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from pages_of(part)


def with_all_pages(nav: list[Any], pages: Iterable[str]) -> list[Any]:
    """The navigation, with those of these pages that it does not name at its end."""
    others = sorted(page for page in set(pages) - set(pages_of(nav)) if not re.match(r"decisions/0\d+-", page))
    return [*nav, {"More": others}] if others else nav


def on_config(config: Any) -> Any:
    """All pages, and anchors as they are elsewhere; modules are found from the root, wherever the build is started."""
    os.chdir(ROOT)
    config["nav"] = with_all_pages(
        config["nav"], (str(p.relative_to(ROOT / "docs")) for p in ROOT.glob("docs/**/*.md"))
    )
    config["mdx_configs"].setdefault("toc", {})["slugify"] = anchor_of
    return config


def on_files(files_: Any, config: Any) -> Any:
    """Add the pages and files that do not lie in docs/."""
    from mkdocs.structure.files import File

    for path, name in PAGES.items():
        files_.append(File.generated(config, name, abs_src_path=str(ROOT / path)))
    for path in files():
        files_.append(File.generated(config, f"repository/{path}", abs_src_path=str(ROOT / path)))
    return files_


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """What is made of a page before it is rendered."""
    return for_site(markdown, page.file.src_uri)

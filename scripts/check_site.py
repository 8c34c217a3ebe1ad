"""Follow every link of the built documentation site, and see that its pages load nothing from elsewhere.

    python scripts/check_site.py build/site

Refused are: a link to a file or an anchor that is not there, and anything that a browser would fetch from another host
(scripts, styles, images, frames, `url(...)` in styles). Links for readers to other hosts are free. Exit code 1, and a
line for each fault.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

FETCHED = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
    "link": "href",
}
"""What a browser fetches with the page."""

_IN_STYLE = re.compile(r"url\(\s*['\"]?((?:https?:)?//[^'\")]+)|@import\s+['\"]((?:https?:)?//[^'\"]+)")


@dataclass
class Page(HTMLParser):
    """What a page refers to, and what others can refer to."""

    html: str
    anchors: set[str] = field(default_factory=set)
    links: set[str] = field(default_factory=set)
    fetched: set[str] = field(default_factory=set)
    drawn: bool = False
    """Whether it has a diagram that the theme draws by a script from another host."""

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take down what one element says."""
        said = {name: value for name, value in attrs if value is not None}
        self.anchors |= {said[name] for name in ("id", "name") if name in said}
        self.drawn = self.drawn or "mermaid" in said.get("class", "").split()
        if tag == "a" and "href" in said:
            self.links.add(said["href"])
        elif tag in FETCHED and FETCHED[tag] in said:
            self.fetched.add(said[FETCHED[tag]])
        if "style" in said:
            self.fetched |= foreign_styles(said["style"])


def foreign_styles(css: str) -> set[str]:
    """What a style fetches from other hosts."""
    return {found[1] or found[2] for found in _IN_STYLE.finditer(css)}


def faults(site: Path) -> list[str]:
    """A line for each fault of a site."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    found = [] if pages else [f"{site}: there is no page"]
    for path, page in pages.items():
        name = path.relative_to(site)
        if page.drawn:
            found.append(f"{name}: a diagram (mermaid) is drawn by a script from another host")
        found += [f"{name}: loads {link} from another host" for link in sorted(page.fetched) if urlsplit(link).netloc]
        for link in sorted(page.links | page.fetched):
            wrong = _leads_nowhere(link, path, site, pages)
            if wrong:
                found.append(f"{name}: {link}: {wrong}")
    for path in sorted(site.rglob("*.css")):
        found += [
            f"{path.relative_to(site)}: loads {url} from another host"
            for url in sorted(foreign_styles(path.read_text()))
        ]
    return found


def _leads_nowhere(link: str, path: Path, site: Path, pages: dict[Path, Page]) -> str | None:
    """What is wrong with a link of a page; None for one that leads somewhere, or out of the site."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return None
    place = unquote(parts.path)
    target = path
    if place:
        target = (site / place.lstrip("/") if place.startswith("/") else path.parent / place).resolve()
        if target.is_dir():
            target /= "index.html"
    if not target.is_file():
        return "there is no such file"
    anchor = unquote(parts.fragment)
    if anchor and target in pages and anchor not in pages[target].anchors:
        return "there is no such anchor"
    return None


def main() -> int:
    """Say what is wrong."""
    site = Path(sys.argv[1]).resolve()
    found = faults(site)
    for line in found:
        print(line, file=sys.stderr)
    print(f"{len(list(site.rglob('*.html')))} pages, {len(found)} faults: {site / 'index.html'}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

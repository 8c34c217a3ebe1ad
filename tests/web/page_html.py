"""Reads the HTML of pages for tests: elements with their attributes and texts, and what is not closed."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "link", "br", "input", "hr"}


@dataclass
class Element:
    """An element, and all text inside of it."""

    tag: str
    attributes: dict[str, str]
    text: str = ""


@dataclass
class Read(HTMLParser):
    """A page that was read. `unbalanced`: end tags that fit no element, and elements that nobody has closed."""

    page: str
    elements: list[Element] = field(default_factory=list)
    unbalanced: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._open: list[Element] = []
        self.feed(self.page)
        self.close()
        self.unbalanced += [element.tag for element in self._open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """An element begins."""
        element = Element(tag, {name: value or "" for name, value in attrs})
        self.elements.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """An element of SVG that has nothing inside."""
        self.elements.append(Element(tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        """An element ends."""
        if self._open and self._open[-1].tag == tag:
            self._open.pop()
        else:
            self.unbalanced.append(f"/{tag}")

    def handle_data(self, data: str) -> None:
        """Text, of all elements around it."""
        for element in self._open:
            element.text += data

    def all(self, tag: str, **attributes: str) -> list[Element]:
        """The elements of this tag with these attributes; `of` stands for `class`, one of which is enough."""
        of = attributes.pop("of", None)
        return [
            e
            for e in self.elements
            if e.tag == tag
            and (of is None or of in e.attributes.get("class", "").split())
            and all(e.attributes.get(name.replace("_", "-")) == value for name, value in attributes.items())
        ]

    def one(self, tag: str, **attributes: str) -> Element:
        """The only one of them."""
        (found,) = self.all(tag, **attributes)
        return found

"""The colours of the page are far enough apart, by light and in the dark (WCAG 2.2, level AA)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tidegate.web.page

CSS = (Path(tidegate.web.page.__file__).parent / "static" / "page.css").read_text(encoding="utf-8")

TEXTS = [
    *((text, ground) for text in ("text", "muted", "link") for ground in ("ground", "card")),
    *((text, "card") for text in ("good", "bad", "waiting", "over", "pressed-text")),
    *((name, f"{name}-ground") for name in ("good", "bad", "waiting", "over")),
    *(("text", f"{name}-ground") for name in ("good", "waiting", "over", "pressed-low", "pressed-high")),
    ("pressed-text", "pressed-low-ground"),
    ("pressed-text", "pressed-high-ground"),
    ("muted", "over-ground"),
]
MARKS = [
    *((name, "card") for name in ("bar-busy", "bar-pressed", "bar-idle")),
    *((name, "card") for name in ("phase-delay", "phase-alignment", "phase-sync", "phase-async")),
    *((name, "card") for name in ("mark-good", "mark-bad", "mark-savepoint", "focus", "waiting")),
    ("bar-pressed", "pressed-low-ground"),
    ("bar-pressed", "pressed-high-ground"),
    *(("figure", name) for name in ("phase-delay", "phase-alignment")),
]


def colours(dark: bool) -> dict[str, str]:
    """The colours by name."""
    light, in_the_dark = re.findall(r":root \{(.*?)\}", CSS, re.DOTALL)
    found = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", light))
    return found | dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", in_the_dark)) if dark else found


def luminance(colour: str) -> float:
    """How bright it is, as WCAG defines it."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """From 1 to 21."""
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_colours_can_be_told_apart(dark: bool) -> None:
    """Texts 4.5 to 1, lines and bars 3 to 1."""
    known = colours(dark)
    close = [(a, b, contrast(known[a], known[b])) for a, b in TEXTS if contrast(known[a], known[b]) < 4.5]
    close += [(a, b, contrast(known[a], known[b])) for a, b in MARKS if contrast(known[a], known[b]) < 3]
    assert close == []


def test_every_colour_stands_in_the_lists() -> None:
    """Elsewhere only names are used, and the dark has each of them."""
    rules = CSS.split("* { box-sizing", 1)[1]
    assert re.findall(r"#[0-9a-fA-F]{3,8}\b|rgba?\(", rules) == []
    assert set(re.findall(r"var\(--([\w-]+)\)", rules)) == set(colours(dark=False))
    light, in_the_dark = (
        set(re.findall(r"--([\w-]+):", block)) for block in re.findall(r":root \{(.*?)\}", CSS, re.DOTALL)
    )
    assert light == in_the_dark

"""`wrap`: a name as the lines that fit into a box of a picture, whose text no browser wraps.

Rules:
- Widths are estimated by kinds of characters, as DejaVu Sans Bold has them. Other fonts of screens are narrower.
- A line breaks behind a space, a hyphen, an underscore or an arrow; a word that is longer than a line breaks anywhere.
- What does not fit is cut, and ends in an ellipsis.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

ELLIPSIS = "…"

_WIDTHS_EM = {
    character: em
    for characters, em in (
        ("'", 0.31),
        ("ijlIJ/|\\,. ", 0.38),
        (":;-f!()[]", 0.46),
        ('tr_`"*', 0.52),
        ("csz?", 0.6),
        ("Lvxyaek", 0.68),
        ("ohnudbpqgEFTSY$0123456789{}", 0.72),
        ("CPZBAKRVX", 0.77),
        ("wOQ&", 0.92),
        ("mM%@…", 1.04),
        ("W", 1.1),
    )
    for character in characters
}
"""Of DejaVu Sans Bold, rounded up."""

_OTHER_EM = 0.84
"""All other ASCII characters, and nearly all other letters."""

_FULL_EM = 1.05

_WORD = re.compile(r"\S*?(?:->|[-_/]|(?=\s)|$)\s*")


def width_em(text: str) -> float:
    """Returns how wide a text is, in heights of its font."""
    return sum(map(_character_em, text))


def wrap(text: str, widths_em: Sequence[float]) -> list[str]:
    """Returns at most one line for each of these widths, none of which is wider. An empty text has no lines."""
    lines: list[str] = []
    rest = text.strip()
    for number, line_em in enumerate(widths_em):
        if not rest:
            break
        if number == len(widths_em) - 1:
            lines.append(_cut(rest, line_em))
            break
        line = _begin(rest, line_em)
        lines.append(line.rstrip())
        rest = rest[len(line) :].lstrip()
    return lines


def _begin(text: str, line_em: float) -> str:
    """Returns the words that fit, or as many characters as fit of a word that is longer; at least one character."""
    taken = ""
    for word in _WORD.findall(text):
        if width_em((taken + word).rstrip()) > line_em:
            break
        taken += word
    if taken:
        return taken
    return text[: max(1, _fitting(text, line_em))]


def _cut(text: str, line_em: float) -> str:
    if width_em(text) <= line_em:
        return text
    return text[: _fitting(text, line_em - width_em(ELLIPSIS))].rstrip() + ELLIPSIS


def _fitting(text: str, line_em: float) -> int:
    """Returns how many characters fit."""
    used = 0.0
    for place, character in enumerate(text):
        used += _character_em(character)
        if used > line_em:
            return place
    return len(text)


def _character_em(character: str) -> float:
    known = _WIDTHS_EM.get(character)
    if known is not None:
        return known
    if unicodedata.combining(character):
        return 0.0
    return _FULL_EM if unicodedata.east_asian_width(character) in ("W", "F") else _OTHER_EM

"""Keeps values of users' rows, and secrets, out of logs, event logs, pages and REST.

Rules:

- Code that writes a value of a row, a key or a record into an error puts it between two marks (`value_text`,
  `marked`). The marks are plain characters. They survive when the text is nested in other errors, pickled, or sent to
  another process.
- A text for a log, an event log, a page or REST passes through `shown_text`. Text between marks is withheld there,
  unless the setting `log_rows` is on.
- The program's own driver gets the values: `unmarked` removes the marks.
- Secrets are removed from every such text, whatever the setting is (`without_secrets`): passwords in URLs, and the
  value after a name such as `password`, `token` or `secret`.
- A value never contains a mark: `marked` replaces marks in it.
"""

from __future__ import annotations

import re
from collections import OrderedDict

OPEN, CLOSE = "\N{SINGLE LEFT-POINTING ANGLE QUOTATION MARK}", "\N{SINGLE RIGHT-POINTING ANGLE QUOTATION MARK}"
WITHHELD = "<withheld>"
"""Text that replaces each value where `log_rows` is off."""
_BETWEEN_MARKS = re.compile(f"{OPEN}[^{OPEN}{CLOSE}]*(?:{CLOSE}|$)")
_STAND_INS = str.maketrans({OPEN: "<", CLOSE: ">"})
_REMOVED = str.maketrans({OPEN: None, CLOSE: None})
_TEXTS_MAX = 16
_WORD_CHARACTERS = 3
_ANYWHERE_CHARACTERS = 8

_HIDDEN = "***"
_SECRET_WORDS = (
    r"pass(?:word|wd|phrase)|secret|token|credentials?|(?:access|api|private|account|sas)[._-]?key|authorization"
)
_SECRETS = (
    (re.compile(r"(://[^\s/@:'\"]*):(?!\d+(?:/|$))[^\s@]+@"), rf"\1:{_HIDDEN}@"),
    (re.compile(r"\b(bearer|basic)\s+[\w.~+/=-]{8,}", re.IGNORECASE), rf"\1 {_HIDDEN}"),
    (
        re.compile(
            rf"""((?:{_SECRET_WORDS})[\w.-]*(?:["']\s*[:=]|\s?=)\s*)(?:"[^"]*"?|'[^']*'?|[^\s'",;&)}}\]]+)""",
            re.IGNORECASE,
        ),
        rf"\1{_HIDDEN}",
    ),
)
"""Matches secrets: passwords in URLs, headers, and settings written as name=value or as in a dict."""

_rows_in_logs = False


def marked(text: str) -> str:
    """Returns the text of a value between marks."""
    return f"{OPEN}{text.translate(_STAND_INS)}{CLOSE}"


def value_text(value: object, characters_max: int = 500) -> str:
    """Returns the repr of a value between marks, shortened, for an error's text. Never raises."""
    return marked(repr_text(value, characters_max))


def repr_text(value: object, characters_max: int = 500) -> str:
    """Returns the repr of a program's argument, shortened, for an error's text. Never raises.

    For values of rows use `value_text`.
    """
    try:
        text = str.__str__(repr(value))
    except BaseException as raised:  # noqa: BLE001 (code of users: the failure must still be reported)
        name = type.__dict__["__name__"].__get__(type(value))
        return f"<a {name}, whose repr raised {type(raised).__name__}>"
    return text if len(text) <= characters_max else text[:characters_max] + "…"


def mark_values(text: str, values: list[str]) -> str:
    """Returns a foreign text, such as an exception of a library, with marks around each of the values in it."""
    wanted = sorted({value.translate(_STAND_INS) for value in values if value and value in text}, key=len, reverse=True)
    if not wanted:
        return text
    found = re.compile("|".join(map(_place_of, wanted)))
    parts, at = [], 0
    for known in _BETWEEN_MARKS.finditer(text):
        parts += [found.sub(lambda match: marked(match[0]), text[at : known.start()]), known[0]]
        at = known.end()
    return "".join([*parts, found.sub(lambda match: marked(match[0]), text[at:])])


def _place_of(value: str) -> str:
    """Returns a pattern that finds a value in a text. A short value matches only as a word, and a very short one only
    in quotes.
    """
    exact = re.escape(value)
    if len(value) < _WORD_CHARACTERS:
        return rf"(?<=['\"`]){exact}(?=['\"`])"
    return rf"(?<!\w){exact}(?!\w)" if len(value) < _ANYWHERE_CHARACTERS else exact


def with_marks_of_cut(head: str, tail: str) -> tuple[str, str]:
    """Returns both ends of a text with its middle cut out, each with the marks that the cut removed."""
    if head.count(OPEN) > head.count(CLOSE):
        head += CLOSE
    if CLOSE in tail and (OPEN not in tail or tail.index(CLOSE) < tail.index(OPEN)):
        tail = OPEN + tail
    return head, tail


def unmarked(text: str) -> str:
    """Returns the text with its values and without marks, for the program's own driver and for tables."""
    return text.translate(_REMOVED)


def shown_text(text: str, rows: bool) -> str:
    """Returns a text for a log, an event log, a page or REST. `rows` is True if the setting `log_rows` is on."""
    text = without_secrets(text)
    if OPEN not in text and CLOSE not in text:
        return text
    return unmarked(text) if rows else _BETWEEN_MARKS.sub(WITHHELD, text).translate(_REMOVED)


def without_secrets(text: str) -> str:
    """Returns the text with stars in place of passwords, tokens and keys."""
    for pattern, shown in _SECRETS:
        text = pattern.sub(shown, text)
    return text


def logged_text(text: str) -> str:
    """Returns a text as the logs of this process may show it."""
    return shown_text(text, _rows_in_logs)


def show_rows_in_logs(rows: bool) -> None:
    """Sets whether the logs of this process may have values of rows. The newest call wins, as for log levels."""
    global _rows_in_logs
    _rows_in_logs = rows


class WithheldTexts:
    """Remembers the newest texts with withheld values, in memory only, for the program's own driver."""

    def __init__(self) -> None:
        self._whole: OrderedDict[str, str] = OrderedDict()

    def withhold(self, text: str, rows: bool) -> str:
        """Returns the result of `shown_text`, and remembers the text with its values."""
        shown = shown_text(text, rows)
        if shown != text:
            self._whole[shown] = without_secrets(unmarked(text))
            self._whole.move_to_end(shown)
            while len(self._whole) > _TEXTS_MAX:
                self._whole.popitem(last=False)
        return shown

    def whole(self, text: str | None) -> str | None:
        """Returns the text with the withheld values, if they are still known."""
        for shown, whole in list(self._whole.items()):
            if text is not None and shown in text:
                return text.replace(shown, whole)
        return text

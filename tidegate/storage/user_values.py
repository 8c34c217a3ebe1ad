"""Keeps values of users' rows, and secrets, out of logs, event logs, pages and REST.

Rules:

- Code that writes a value of a row, a key or a record into an error puts it between two marks (`value_text`, `marked`).
  The marks are plain characters. They survive when the text is nested in other errors, pickled, or sent to another
  process.
- A text for a log, an event log, a page or REST passes through `shown_text`. Text between marks is withheld there,
  unless the setting `log_rows` is on.
- The program's own driver gets the values: `unmarked` removes the marks.
- `without_secrets` removes secrets from every such text, whatever the setting is: passwords in URLs, and the value
  after a name such as `password`, `token` or `secret`.
- A value never contains a mark: `marked` replaces marks in it.
"""

from __future__ import annotations

import re
from collections import OrderedDict

OPEN, CLOSE = "\N{SINGLE LEFT-POINTING ANGLE QUOTATION MARK}", "\N{SINGLE RIGHT-POINTING ANGLE QUOTATION MARK}"
WITHHELD = "<withheld>"
"""Text that replaces each value if `log_rows` is off."""
_BETWEEN_MARKS = re.compile(f"{OPEN}[^{OPEN}{CLOSE}]*(?:{CLOSE}|$)")
_LINE = re.compile(f"(?:{OPEN}[^{OPEN}{CLOSE}]*(?:{CLOSE}|$)|[^\\n])+")
"""A line of a text. A line break between marks does not end it."""
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
    """Puts marks around the text of a value, so that `shown_text` can withhold the value."""
    return f"{OPEN}{text.translate(_STAND_INS)}{CLOSE}"


def value_text(value: object, characters_max: int = 500) -> str:
    """Returns the repr of a row's value between marks, shortened, for an error text. Never raises."""
    return marked(repr_text(value, characters_max))


def repr_text(value: object, characters_max: int = 500) -> str:
    """Returns the repr of a program's argument, shortened, for an error text. Never raises.

    For values of rows use `value_text`.
    """
    try:
        text = str.__str__(repr(value))
    except BaseException as raised:  # noqa: BLE001 (code of users: the failure must still be reported)
        name = type.__dict__["__name__"].__get__(type(value))
        return f"<a {name}, whose repr raised {type(raised).__name__}>"
    return text if len(text) <= characters_max else text[:characters_max] + "…"


def mark_values(text: str, values: list[str]) -> str:
    """Puts marks around each occurrence of the values in a text, such as the message of a library's exception."""
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
    """Returns a regular expression that finds a value in a text.

    Short values match only as whole words, and very short values only in quotes.
    """
    exact = re.escape(value)
    if len(value) < _WORD_CHARACTERS:
        return rf"(?<=['\"`]){exact}(?=['\"`])"
    return rf"(?<!\w){exact}(?!\w)" if len(value) < _ANYWHERE_CHARACTERS else exact


def with_marks_of_cut(head: str, tail: str) -> tuple[str, str]:
    """Returns the two ends of a text whose middle was cut out, with opening and closing marks balanced in each end."""
    if head.count(OPEN) > head.count(CLOSE):
        head += CLOSE
    if CLOSE in tail and (OPEN not in tail or tail.index(CLOSE) < tail.index(OPEN)):
        tail = OPEN + tail
    return head, tail


def unmarked(text: str) -> str:
    """Returns the text with its values and without the marks, for the program's own driver and for tables."""
    return text.translate(_REMOVED)


def shown_text(text: str, rows: bool) -> str:
    """Returns the text for a log, an event log, a page or REST, without secrets.

    Values between marks are withheld, unless `rows` is True (the setting `log_rows` is on).
    """
    text = without_secrets(text)
    if OPEN not in text and CLOSE not in text:
        return text
    return unmarked(text) if rows else _BETWEEN_MARKS.sub(WITHHELD, text).translate(_REMOVED)


def without_secrets(text: str) -> str:
    """Returns the text with passwords, tokens and keys replaced by `***`."""
    for pattern, shown in _SECRETS:
        text = pattern.sub(shown, text)
    return text


def logged_text(text: str) -> str:
    """Returns the text for the logs of this process: without secrets, and without values unless `show_rows_in_logs`
    allows them.
    """
    return shown_text(text, _rows_in_logs)


def show_rows_in_logs(rows: bool) -> None:
    """Sets whether the logs of this process may contain values of rows. The newest call applies."""
    global _rows_in_logs
    _rows_in_logs = rows


class WithheldTexts:
    """Stores the original texts for the newest texts with withheld values, in memory only, for the program's own
    driver.

    Texts are stored by line, because the coordinator adds its decision to the first line of an error, before the lines
    of its stack frames.
    """

    def __init__(self) -> None:
        self._whole: OrderedDict[str, str] = OrderedDict()

    def withhold(self, text: str, rows: bool) -> str:
        """Returns the result of `shown_text`, and remembers the original lines."""
        for line in _LINE.findall(without_secrets(text)):
            shown = shown_text(line, rows)
            if shown != line:
                self._whole[shown] = unmarked(line)
                self._whole.move_to_end(shown)
        while len(self._whole) > _TEXTS_MAX:
            self._whole.popitem(last=False)
        return shown_text(text, rows)

    def whole(self, text: str | None) -> str | None:
        """Returns the text with its withheld values restored, as far as they are remembered."""
        if text is None:
            return None
        # The longest line comes first, because a shorter line may be part of it.
        for shown, whole in sorted(self._whole.items(), key=lambda each: len(each[0]), reverse=True):
            text = text.replace(shown, whole)
        return text

"""How the pages write what a job says: sizes, durations, rates, moments, and texts of users.

Rules:
- What is not known is a dash, never a zero: None, what is no number, and Flink's -1.
- A text that a user or an error has written is bounded, and has no characters that hide or reorder others. Escaping is
  left to the templates, which escape everything.
- Moments are in UTC.
"""

from __future__ import annotations

import math
import unicodedata
from datetime import UTC, datetime
from urllib.parse import quote

from tidegate.actors.coordinator.narrator import bytes_text, seconds_text
from tidegate.storage.units import duration_text

UNKNOWN = "–"  # noqa: RUF001 (a dash for people)
NAME_MAX = 80
LINE_MAX = 300
TRACE_MAX = 12_000

_MINUTE_MS = 60_000
_LATEST_MS = 253_402_300_799_000
"""The end of the year 9999, after which Python has no dates. Flink's largest watermark lies behind it."""


def number(value: object) -> float | None:
    """What is known of a number: None for null, `"NaN"` and the like, and for negative ones."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        return None
    return value


def size(value: object) -> str:
    """Bytes as people read them, such as `1.2 MB`."""
    size_bytes = number(value)
    return UNKNOWN if size_bytes is None else bytes_text(int(size_bytes))


def span(value: object) -> str:
    """A duration in ms as people read it: `84 ms`, `1.2 s`, `3 min 20 s`, `2 h 5 min`."""
    duration_ms = number(value)
    if duration_ms is None:
        return UNKNOWN
    return seconds_text(int(duration_ms)) if duration_ms < _MINUTE_MS else duration_text(int(duration_ms))


def count(value: object) -> str:
    """A whole number with its thousands apart."""
    known = number(value)
    return UNKNOWN if known is None else f"{int(known):,}"


def rate(value: object) -> str:
    """Something a second, in three digits or less: `12.3k`, `987`, `0.4`."""
    a_second = number(value)
    if a_second is None:
        return UNKNOWN
    if 0 < a_second < 9.95:
        return f"{a_second:.1f}"
    for unit, of in (("", 1.0), ("k", 1e3), ("M", 1e6)):
        if a_second < 999.5 * of:
            return f"{a_second / of:.1f}{unit}" if unit and a_second < 99.95 * of else f"{a_second / of:.0f}{unit}"
    return f"{a_second / 1e9:,.1f}G"


def percent(value: object) -> str:
    """A part of one, in percent."""
    part = number(value)
    return UNKNOWN if part is None else f"{100 * part:.0f} %"


def clock(at_ms: object) -> str:
    """The time of day, in UTC."""
    return _formatted(at_ms, "%H:%M:%S")


def moment(at_ms: object) -> str:
    """Date and time, in UTC."""
    return _formatted(at_ms, "%Y-%m-%d %H:%M:%S")


def machine_moment(at_ms: object) -> str:
    """Date and time as the attribute `datetime` of HTML wants it."""
    return _formatted(at_ms, "%Y-%m-%dT%H:%M:%SZ")


def ago(at_ms: object, now_ms: float) -> str:
    """How long ago something was. Clocks may differ, so what lies ahead is `just now`."""
    since = number(at_ms)
    if since is None:
        return UNKNOWN
    return f"{span(now_ms - since)} ago" if now_ms - since >= 1_000 else "just now"


def is_moment(at_ms: object) -> bool:
    """Whether a number is a moment that can be written as a date."""
    since = number(at_ms)
    return since is not None and since <= _LATEST_MS


def _formatted(at_ms: object, form: str) -> str:
    since = number(at_ms)
    if since is None or not is_moment(since):
        return UNKNOWN
    return datetime.fromtimestamp(since / 1_000, UTC).strftime(form)


def quoted(text: object) -> str:
    """A text as one part of the path of an address."""
    return quote(str(text), safe="")


def line(text: object, characters_max: int = LINE_MAX) -> str:
    """A text of a user as one bounded line."""
    return _bounded(" ".join(_visible(str(text)[: 4 * characters_max]).split()), characters_max)


def name(text: object) -> str:
    """A name that a user has given, as one bounded line."""
    return line(text, NAME_MAX)


def trace(text: object, characters_max: int = TRACE_MAX) -> str:
    """A stack trace, its lines kept. The end says what went wrong, so what is left out is in the middle."""
    whole = str(text)
    if len(whole) <= characters_max:
        return _visible(whole)
    head, tail = characters_max // 4, 3 * characters_max // 4
    left_out = f"\n... {len(whole) - head - tail:,} characters are left out ...\n"
    return _visible(whole[:head]) + left_out + _visible(whole[-tail:])


def _bounded(text: str, characters_max: int) -> str:
    return text if len(text) <= characters_max else text[: characters_max - 1] + "…"


def _visible(text: str) -> str:
    """Control characters, and those that turn the direction of others around, are shown as unreadable ones."""
    return "".join("\N{REPLACEMENT CHARACTER}" if _hides(character) else character for character in text)


def _hides(character: str) -> bool:
    return character not in "\n\t" and unicodedata.category(character) in {"Cc", "Cf", "Cs", "Co"}

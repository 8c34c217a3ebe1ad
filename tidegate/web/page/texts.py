"""The texts of the pages: sizes, durations, rates, times, and text from users.

Rules:

- An unknown value is a dash, never a zero: None, a value that is not a number, and Flink's -1.
- Text from users and errors is limited in length, and has no characters that hide or reorder others. The templates
  escape everything.
- Times are in UTC.
"""

from __future__ import annotations

import math
import unicodedata
from datetime import UTC, datetime
from urllib.parse import quote

from tidegate.actors.coordinator.job_history import bytes_text, seconds_text
from tidegate.storage.units import duration_text

UNKNOWN = "–"  # noqa: RUF001 (a dash for people)
NAME_MAX = 80
LINE_MAX = 300
TRACE_MAX = 12_000

_MINUTE_MS = 60_000
_LATEST_MS = 253_402_300_799_000
"""The end of the year 9999 in ms since the epoch, the last date in Python. Flink's largest watermark is later."""


def number(value: object) -> float | None:
    """Returns a known number, or None for null, `"NaN"` and similar values, and negative numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        return None
    return value


def size(value: object) -> str:
    """Returns a number of bytes as text, such as `1.2 MB`."""
    size_bytes = number(value)
    return UNKNOWN if size_bytes is None else bytes_text(int(size_bytes))


def span(value: object) -> str:
    """Returns a duration in ms as text: `84 ms`, `1.2 s`, `3 min 20 s`, `2 h 5 min`."""
    duration_ms = number(value)
    if duration_ms is None:
        return UNKNOWN
    return seconds_text(int(duration_ms)) if duration_ms < _MINUTE_MS else duration_text(int(duration_ms))


def count(value: object) -> str:
    """Returns a whole number as text, with thousands separators."""
    known = number(value)
    return UNKNOWN if known is None else f"{int(known):,}"


def rate(value: object) -> str:
    """Returns a rate per second as text with up to three digits: `12.3k`, `987`, `0.4`."""
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
    """Returns a fraction (0 to 1) as text in percent."""
    part = number(value)
    return UNKNOWN if part is None else f"{100 * part:.0f} %"


def clock(at_ms: object) -> str:
    """Returns the time of day as text."""
    return _formatted(at_ms, "%H:%M:%S")


def moment(at_ms: object) -> str:
    """Returns date and time as text."""
    return _formatted(at_ms, "%Y-%m-%d %H:%M:%S")


def machine_moment(at_ms: object) -> str:
    """Returns date and time for the attribute `datetime` of HTML."""
    return _formatted(at_ms, "%Y-%m-%dT%H:%M:%SZ")


def ago(at_ms: object, now_ms: float) -> str:
    """Returns as text how long ago a time was. Clocks may differ, so a future time is `just now`."""
    since = number(at_ms)
    if since is None:
        return UNKNOWN
    return f"{span(now_ms - since)} ago" if now_ms - since >= 1_000 else "just now"


def is_moment(at_ms: object) -> bool:
    """Returns whether a number is a time that Python can represent as a date."""
    since = number(at_ms)
    return since is not None and since <= _LATEST_MS


def _formatted(at_ms: object, form: str) -> str:
    since = number(at_ms)
    if since is None or not is_moment(since):
        return UNKNOWN
    return datetime.fromtimestamp(since / 1_000, UTC).strftime(form)


def quoted(text: object) -> str:
    """Returns a text encoded as one segment of a URL path."""
    return quote(str(text), safe="")


def line(text: object, characters_max: int = LINE_MAX) -> str:
    """Returns a text as one line of limited length."""
    return _bounded(" ".join(_visible(str(text)[: 4 * characters_max]).split()), characters_max)


def name(text: object) -> str:
    """Returns a name as one line of limited length."""
    return line(text, NAME_MAX)


def trace(text: object, characters_max: int = TRACE_MAX) -> str:
    """Returns a stack trace with its lines. If it is long, the middle is omitted, because the end has the error."""
    whole = str(text)
    if len(whole) <= characters_max:
        return _visible(whole)
    head = characters_max // 4
    tail = 3 * characters_max // 4
    omitted = f"\n... {len(whole) - head - tail:,} characters omitted ...\n"
    return _visible(whole[:head]) + omitted + _visible(whole[-tail:])


def _bounded(text: str, characters_max: int) -> str:
    return text if len(text) <= characters_max else text[: characters_max - 1] + "…"


def _visible(text: str) -> str:
    """Replaces control characters and characters that change the direction of text."""
    return "".join("\N{REPLACEMENT CHARACTER}" if _hides(character) else character for character in text)


def _hides(character: str) -> bool:
    return character not in "\n\t" and unicodedata.category(character) in {"Cc", "Cf", "Cs", "Co"}

"""Parses durations and sizes in human-readable form, without rounding or guessing units, and formats durations.

Units follow Flink: `kb` is 1,024 bytes, and a number without a unit is milliseconds or bytes. Durations may also be
written as Spark's intervals ("1 hour 30 minutes") and in ISO 8601 ("PT1H30M").
"""

from __future__ import annotations

import re
from datetime import timedelta
from decimal import Decimal

from tidegate.storage.errors import ConfigurationError

_DURATION_UNITS_MS = {
    name: unit_ms
    for unit_ms, names in {
        1: ("ms", "milli", "millis", "millisecond", "milliseconds"),
        1_000: ("s", "sec", "secs", "second", "seconds"),
        60_000: ("min", "m", "mins", "minute", "minutes"),
        3_600_000: ("h", "hr", "hrs", "hour", "hours"),
        86_400_000: ("d", "day", "days"),
        7 * 86_400_000: ("w", "week", "weeks"),
    }.items()
    for name in names
}
_SIZE_UNITS_BYTES = {"b": 1} | {
    unit: 1024**power for power, prefix in enumerate("kmgt", start=1) for unit in (prefix, f"{prefix}b", f"{prefix}ib")
}
_AMOUNT = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([A-Za-z]*)\s*")
_SUM = re.compile(r"(?:\s*[0-9.]+\s*[A-Za-z]+\s*){2,6}")
_ISO = re.compile(
    r"P(?:([0-9]{1,9})W)?(?:([0-9]{1,9})D)?(?:T(?:([0-9]{1,9})H)?(?:([0-9]{1,9})M)?(?:([0-9]{1,9}(?:\.[0-9]{1,9})?)S)?)?",
    re.IGNORECASE,
)
_ISO_UNITS = ("w", "d", "h", "min", "s")


def parse_duration_ms(value: str | timedelta | int, *, setting: str = "duration") -> int:
    """Returns the milliseconds of `"250ms"`, `"5 seconds"`, `"1h 30min"`, `"PT1H30M"`, a timedelta, or a number of ms.

    Raises ConfigurationError, naming `setting`, for any other value, a negative value, or a fraction of a millisecond.
    """
    if isinstance(value, timedelta):
        microseconds = value // timedelta(microseconds=1)
        if microseconds < 0 or microseconds % 1000:
            raise ConfigurationError(
                f"{setting}: {value!r} is negative or finer than a millisecond; give a whole number of milliseconds"
            )
        return microseconds // 1000
    advice = 'write "250ms", "10s", "5 minutes", "1h", "2d" or "PT1H30M"'
    if isinstance(value, str):
        parts = _duration_parts(value)
        if parts:
            return sum(_parse(part, setting, _DURATION_UNITS_MS, advice) for part in parts)
    return _parse(value, setting, _DURATION_UNITS_MS, advice)


def _duration_parts(text: str) -> list[str]:
    """Splits a duration such as "1h 30min" into its parts (amount with unit).

    Empty if it has only one part, or none.
    """
    if (iso := _ISO.fullmatch(text.strip())) is not None and any(iso.groups()) and text.strip()[-1] not in "Tt":
        return [f"{amount}{unit}" for amount, unit in zip(iso.groups(), _ISO_UNITS, strict=True) if amount]
    if _SUM.fullmatch(text):
        return [found[0] for found in re.finditer(r"[0-9.]+\s*[A-Za-z]+", text)]
    return []


def parse_size_bytes(value: str | int, *, setting: str = "size") -> int:
    """Returns the bytes of `"64mb"`, `"20kb"`, `"1gib"`, or a number of bytes. `kb` and `kib` are both 1,024 bytes.

    Raises ConfigurationError, naming `setting`, for any other value, a negative value, or a fraction of a byte.
    """
    return _parse(value, setting, _SIZE_UNITS_BYTES, 'write "512b", "20kb", "64mb" or "1gb"')


def _parse(value: object, setting: str, units: dict[str, int], advice: str) -> int:
    # bool is an int to Python, and YAML reads `yes` as one.
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise ConfigurationError(f"{setting}: {value} is negative; {advice}")
        return value
    match = _AMOUNT.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ConfigurationError(f"{setting}: cannot read {value!r}; {advice}")
    factor = units.get(match[2].lower() or next(iter(units)))
    if factor is None:
        raise ConfigurationError(f"{setting}: unknown unit {match[2]!r} in {value!r}; {advice}")
    numerator, denominator = Decimal(match[1]).as_integer_ratio()
    amount, rest = divmod(numerator * factor, denominator)
    if rest:
        raise ConfigurationError(f"{setting}: {value!r} is not a whole number of {next(iter(units))}; {advice}")
    return amount


def duration_text(duration_ms: int) -> str:
    """Returns a duration in ms as text in its two largest units, such as `2 h 5 min`. A negative duration is `0 s`."""
    seconds = max(0, duration_ms) // 1_000
    units = [("d", seconds // 86_400), ("h", seconds // 3_600 % 24), ("min", seconds // 60 % 60), ("s", seconds % 60)]
    first = next((place for place, (_, count) in enumerate(units) if count), len(units) - 1)
    return " ".join(f"{count} {unit}" for unit, count in units[first : first + 2] if count or unit == "s")

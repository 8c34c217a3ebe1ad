"""Parses durations and sizes as people write them, exactly: no rounding, no guessed unit. Writes durations for people.

Units follow Flink: `kb` is 1,024 bytes, and a number without a unit is milliseconds or bytes.
"""

from __future__ import annotations

import re
from datetime import timedelta
from decimal import Decimal

from tidegate.storage.errors import ConfigurationError

_DURATION_UNITS_MS = {"ms": 1, "s": 1_000, "min": 60_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_SIZE_UNITS_BYTES = {"b": 1} | {
    unit: 1024**power for power, prefix in enumerate("kmgt", start=1) for unit in (prefix, f"{prefix}b", f"{prefix}ib")
}
_AMOUNT = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([A-Za-z]*)\s*")


def parse_duration_ms(value: str | timedelta | int, *, setting: str = "duration") -> int:
    """Milliseconds of `"250ms"`, `"10s"`, `"5min"`, `"1h"`, `"2d"`, a timedelta, or a number of milliseconds.

    Raises ConfigurationError, naming `setting`, for anything else, a negative value, or a part of a
    millisecond.
    """
    if isinstance(value, timedelta):
        microseconds = value // timedelta(microseconds=1)
        if microseconds < 0 or microseconds % 1000:
            raise ConfigurationError(f"{setting}: {value!r} is negative or finer than a millisecond")
        return microseconds // 1000
    return _parse(value, setting, _DURATION_UNITS_MS, 'write "250ms", "10s", "5min", "1h" or "2d"')


def parse_size_bytes(value: str | int, *, setting: str = "size") -> int:
    """Bytes of `"64mb"`, `"20kb"`, `"1gib"`, or a number of bytes; `kb` and `kib` are both 1,024 bytes.

    Raises ConfigurationError, naming `setting`, for anything else, a negative value, or a part of a byte.
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
    """A duration in its two largest units, such as `2 h 5 min`. A negative one (clocks may differ) is `0 s`."""
    seconds = max(0, duration_ms) // 1_000
    units = [("d", seconds // 86_400), ("h", seconds // 3_600 % 24), ("min", seconds // 60 % 60), ("s", seconds % 60)]
    first = next((place for place, (_, count) in enumerate(units) if count), len(units) - 1)
    return " ".join(f"{count} {unit}" for unit, count in units[first : first + 2] if count or unit == "s")

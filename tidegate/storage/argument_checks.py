"""Checks the fields of option classes as they are built: `DataPlaneOptions(source_rows_max=0): give a whole number …`.

Each check raises ConfigurationError with the class, the field, the value that was given, and the allowed values.
"""

from __future__ import annotations

from collections.abc import Sequence

from tidegate.storage.errors import ConfigurationError

INT64_MAX = 2**63 - 1


def invalid_field(options: object, field: str, allowed: str) -> ConfigurationError:
    """Returns the error for an option field with a wrong value. `allowed` describes the allowed values."""
    return ConfigurationError(f"{type(options).__name__}({field}={getattr(options, field)!r}): give {allowed}")


def check_whole(options: object, *fields: str, least: int, most: int = INT64_MAX, none: bool = False) -> None:
    """Raises ConfigurationError unless each named field is an int from `least` to `most`. `none` also allows None."""
    for field in fields:
        value = getattr(options, field)
        if value is None and none:
            continue
        # True is an int to Python.
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            end = "up" if most == INT64_MAX and not (isinstance(value, int) and value > most) else f"to {most:,}"

            raise invalid_field(options, field, f"a whole number from {least:,} {end}{', or None' if none else ''}")


def check_switch(options: object, *fields: str) -> None:
    """Raises ConfigurationError unless each named field is True or False."""
    for field in fields:
        if not isinstance(getattr(options, field), bool):
            raise invalid_field(options, field, "True or False")


def check_choice(options: object, field: str, choices: Sequence[str | None]) -> None:
    """Raises ConfigurationError unless the value of the field is one of `choices`."""
    value = getattr(options, field)
    if not (value is None or isinstance(value, str)) or value not in choices:
        raise invalid_field(options, field, " or ".join(map(repr, choices)))


def check_folder(options: object, field: str) -> None:
    """Raises ConfigurationError unless the field is a folder path (a non-empty str) or None."""
    value = getattr(options, field)
    if value is not None and (not isinstance(value, str) or not value):
        raise invalid_field(options, field, "the path of a folder as a str, or None")


def check_kind(options: object, field: str, kind: type) -> None:
    """Raises ConfigurationError unless the field is an instance of `kind`."""
    if not isinstance(getattr(options, field), kind):
        raise invalid_field(options, field, f"a {kind.__name__}")

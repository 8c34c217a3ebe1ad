"""Kinds of settings, such as durations and sizes: how a value is written, checked and converted, and in which units it
is shown.

`Kind.read` takes the written value and the title of the setting, and returns the stored value. A wrong value raises
ConfigurationError, which begins with the title.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, cast

from tidegate.actors.drivers.job_context import Standbys
from tidegate.api.name_checks import check_name, location
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.files.file_system_store import check_scheme
from tidegate.storage.units import parse_duration_ms, parse_size_bytes

INTERVAL_MS_MIN = 10
"""The shortest checkpoint interval and timeout in ms, as in Flink."""
STANDBYS_MAX = 1_000
PORT_MAX = 65_535
MS_UNITS = (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1_000), ("ms", 1))
BYTE_UNITS = (("gb", 2**30), ("mb", 2**20), ("kb", 2**10), ("b", 1))
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

Read = Callable[[Any, str], object]
"""A function that checks a written value and returns it in its stored form.

The string argument is the title of the setting, for errors.
"""


@dataclass(frozen=True, slots=True)
class Kind:
    """The kind of a setting's values: which values may be written, and how they are converted and shown."""

    text: str
    """Description of the values that may be written, in Markdown."""
    read: Read
    units: tuple[tuple[str, int], ...] = ()
    """Units in which a number is shown, the largest unit first."""

    def or_none(self) -> Kind:
        """Returns a kind that accepts the same values and also None."""
        read = self.read
        return replace(self, read=lambda value, title: None if value is None else read(value, title))


# --- numbers ------------------------------------------------------------------------------------------------------


def duration(at_least_ms: int = 0, advice: str = "") -> Kind:
    """Returns the kind for durations of at least `at_least_ms`, which are stored in ms.

    `advice` is the end of the error for a shorter one.
    """

    def read(value: str | timedelta | int, title: str) -> int:
        found_ms = parse_duration_ms(value, setting=title)
        if found_ms < at_least_ms:
            raise ConfigurationError(f"{title}: {found_ms} ms is too short; give {at_least_ms} ms or more{advice}")
        return found_ms

    return Kind("duration", read, MS_UNITS)


def _interval(value: str | timedelta | int | None, title: str) -> int | None:
    interval_ms = 0 if value is None else parse_duration_ms(value, setting=title)
    if 0 < interval_ms < INTERVAL_MS_MIN:
        raise ConfigurationError(
            f"{title}: {value!r} is {interval_ms} ms, which is too short; give {INTERVAL_MS_MIN} ms or more, with a "
            f'unit such as "{interval_ms}s", or None for no periodic checkpoints'
        )
    return interval_ms or None


INTERVAL = Kind("duration", _interval, MS_UNITS)
"""The interval between checkpoints in milliseconds, or None for no periodic checkpoints."""


def size(at_least: int = 0, at_most: int | None = None, advice: str = "") -> Kind:
    """Returns the kind for sizes from `at_least` to `at_most` bytes, which are stored in bytes.

    `advice` is the end of the error for a larger one.
    """

    def read(value: str | int, title: str) -> int:
        size_bytes = parse_size_bytes(value, setting=title)
        if size_bytes < at_least:
            raise ConfigurationError(f"{title}: {value!r} is too small; give {at_least} byte or more")
        if at_most is not None and size_bytes > at_most:
            raise ConfigurationError(f"{title}: {value!r} is more than {in_units(at_most, BYTE_UNITS)}{advice}")
        return size_bytes

    return Kind("size", read, BYTE_UNITS)


def number(what: str = "number", at_least: int = 1, at_most: int | None = None) -> Kind:
    """Returns the kind for whole numbers from `at_least` to `at_most`. `what` names the number in errors."""

    def read(value: object, title: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
            raise ConfigurationError(f"{title}: {value!r} is not a {what}; give a whole number from {at_least} up")
        if at_most is not None and value > at_most:
            raise ConfigurationError(
                f"{title}: {value!r} is too large; the largest {what} is {at_most:,}; give a smaller number"
            )
        return value

    return Kind("number", read)


def _number_of_checkpoints(value: object, title: str) -> object:
    if value == -1:
        raise ConfigurationError(f"{title}: -1 is not a number of checkpoints; for any number write {2**31 - 1}")
    return number("number of checkpoints", at_least=0).read(value, title)


NUMBER_OF_CHECKPOINTS = Kind("number", _number_of_checkpoints)
"""A number of checkpoints, at least 0. Flink's -1 (unlimited) is an error with advice on what to write."""
PORT = number("port", at_least=0, at_most=PORT_MAX)


def spare_processes(value: object, title: str) -> Standbys:
    """Returns a number of spare processes, "auto" or "warm". Raises ConfigurationError for any other value."""
    if _lowered(value) == "auto":
        return "auto"
    if _lowered(value) == "warm":
        return "warm"
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= STANDBYS_MAX:
        raise ConfigurationError(
            f"{title}: {value!r} is not a number of spare processes; give a whole number from 0 to {STANDBYS_MAX}, "
            "'auto' or 'warm'"
        )
    return value


STANDBYS = Kind("number, `auto` or `warm`", spare_processes).or_none()


def in_units(value: int, units: tuple[tuple[str, int], ...]) -> str:
    """Returns a text with a number in the largest unit of which it is a multiple, such as `10min`.

    `units` are names with their size, the largest first.
    """
    unit, amount = next((each for each in units if value and value % each[1] == 0), units[-1])
    return f"{value // amount}{unit}"


# --- words --------------------------------------------------------------------------------------------------------


def _switch(value: object, title: str) -> bool:
    if not isinstance(value, bool):
        raise ConfigurationError(f"{title}: {value!r} is neither true nor false; write true or false")
    return value


SWITCH = Kind("`true` or `false`", _switch)


def _lowered(value: object) -> object:
    """Returns a text in lower case, with underscores for dashes.

    Flink writes choices in capitals, and users write either form.
    """
    return value.lower().replace("-", "_") if isinstance(value, str) else value


def choice(
    *words: str,
    also: Mapping[str, str] | None = None,
    advice: Mapping[str, str] | None = None,
    text: str | None = None,
) -> Kind:
    """Returns the kind for a choice between `words`, in upper or lower case.

    `also` maps further accepted words to the word that each means. `advice` maps words that are not accepted, such as
    Flink's, to what to write instead. `text` describes the words on the page.
    """
    meant = {word: word for word in words} | dict(also or {})

    def read(value: object, title: str) -> str:
        for word, kept in meant.items():
            if word == _lowered(value):
                return kept
        instead = (advice or {}).get(str(_lowered(value)))
        raise ConfigurationError(
            f"{title}: {value!r} is none of {', '.join(map(repr, meant))}"
            + (f"; {instead}" if instead else "; give one of them")
        )

    shown = [f"`{word}`" for word in words]
    return Kind(text or f"{', '.join(shown[:-1])} or {shown[-1]}", read)


_IN_MEMORY = (
    "for state in memory write state.backend.type: hashmap, and for checkpoints that are kept in the coordinator's "
    "memory state.checkpoint-storage: jobmanager"
)
BACKEND = choice(
    "columnar",
    "rocksdb",
    also={"hashmap": "columnar"},
    advice={
        "forst": "there is no ForSt backend; write 'columnar' (in memory; Flink's 'hashmap' means the same) or "
        "'rocksdb' (on local disk)",
        "filesystem": "for state in memory with checkpoints in files write state.backend.type: hashmap",
        "memory": _IN_MEMORY,
        "jobmanager": _IN_MEMORY,
    },
    text="`columnar` (also `hashmap`) or `rocksdb`",
)


def _compression(value: object, title: str) -> object:
    if value is None or isinstance(value, bool):  # Flink's setting is a switch
        return "lz4" if value else None
    found = choice("none", "lz4", "zstd").read(value, title)
    return None if found == "none" else found


COMPRESSION = Kind("`none`, `lz4`, `zstd` or `true`", _compression)


def _progress(value: object, title: str) -> object:
    return choice("auto", "bar", "lines", "off").read("off" if value is False else value, title)  # YAML's `off`


PROGRESS = Kind("`auto`, `bar`, `lines` or `off`", _progress)


def _local_aggregation(value: object, title: str) -> object:
    if isinstance(value, str):
        value = {"AUTO": "auto", "TWO_PHASE": "on", "ONE_PHASE": "off"}.get(value.upper(), value)
    elif isinstance(value, bool):  # YAML reads `on` and `off` as booleans
        value = "on" if value else "off"
    return choice("auto", "on", "off").read(value, title)


LOCAL_AGGREGATION = Kind("`auto`, `on` or `off`", _local_aggregation)

# --- texts and places ---------------------------------------------------------------------------------------------


def _place(value: object, title: str) -> str:
    found = location(value, title)
    try:
        check_scheme(found)
    except ConfigurationError as error:
        raise ConfigurationError(f"{title}: {error}") from None
    return found


PLACE = Kind("folder or URL", _place).or_none()
"""A folder or URL of a supported storage, or None."""


def _restore(value: object, title: str) -> object:
    return value if isinstance(value, str) and value and "/" not in value else location(value, title)


RESTORE = Kind("path, `latest` or `latest_or_fresh`", _restore).or_none()


def _name(value: object, title: str) -> object:
    check_name(title, "it", value)
    return value


NAME = Kind("text", _name)
"""A printable text."""


def _host(value: object, title: str) -> str:
    if not isinstance(value, str) or not value or not value.isprintable() or " " in value:
        raise ConfigurationError(
            f"{title}: {value!r} is neither the name nor the address of a host; write one, such as 127.0.0.1"
        )
    return value


HOST = Kind("text", _host)


def _level(value: object, title: str) -> object:
    written = value.upper() if isinstance(value, str) else value
    if written is not None and written not in _LEVELS:
        raise ConfigurationError(f"{title}: {value!r} is none of {', '.join(_LEVELS)}; give one of them")
    return written


LEVEL = Kind("`DEBUG`, `INFO`, `WARNING`, `ERROR` or `CRITICAL`", _level)
"""A level of Python's logging, such as "INFO", or None."""

# --- mappings -----------------------------------------------------------------------------------------------------


def _mapping(value: object, title: str) -> dict[str, object]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ConfigurationError(
            f"{title}: {value!r} is not a mapping of names to values; write lines of the form name: value"
        )
    return dict(value)


MAPPING = Kind("mapping", _mapping)
"""A mapping of names to values that another library defines and checks."""


def _levels(value: object, title: str) -> dict[str, str]:
    found = {name: _level(of, title) for name, of in _mapping(value, title).items()}
    if any(of is None for of in found.values()):
        raise ConfigurationError(
            f"{title}: {value!r} has a logger without a level; write logger: LEVEL, such as tidegate: DEBUG"
        )
    return cast("dict[str, str]", found)


LEVELS = Kind("mapping", _levels)
"""A mapping from names of loggers to their levels."""


def _ray_options(value: object, title: str) -> dict[str, object]:
    found = _mapping(value, title)
    check_runtime_env_is_mapping(found, title)
    return found


RAY_OPTIONS = Kind("mapping", _ray_options)


def check_runtime_env_is_mapping(ray_options: Mapping[str, object], where: str) -> None:
    """Raises ConfigurationError for a `runtime_env` that is neither a mapping nor None."""
    found = ray_options.get("runtime_env")
    if found is not None and not isinstance(found, Mapping):
        raise ConfigurationError(
            f"{where}: runtime_env is {found!r}, and not a mapping; give one such as {{'env_vars': {{'A': 'b'}}}}"
        )


def _spark_configs(value: object, title: str) -> dict[str, str]:
    found = {key if key.startswith("spark.") else f"spark.{key}": of for key, of in _mapping(value, title).items()}
    wrong = [key for key, of in found.items() if not isinstance(of, str | int | float)]
    if wrong:
        raise ConfigurationError(
            f"{title}: {wrong[0]} is {found[wrong[0]]!r}, and neither a text nor a number; give one of them"
        )
    return {key: str(of).lower() if isinstance(of, bool) else str(of) for key, of in found.items()}


SPARK_CONFIGS = Kind("mapping", _spark_configs)
"""A mapping of Spark settings. Values are stored as strings, as Spark does."""

"""Checks the values of settings: each function takes what was written and returns what is kept.

They are the validators of the fields of the sections (`section.py`). A wrong value raises ConfigurationError with the
name of the setting.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import cast

from pydantic import ValidationInfo

from tidegate.actors.drivers.process_settings import Standbys
from tidegate.api.config.sections.setting_names import titled
from tidegate.api.given_names import check_name, location
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.files.file_system_store import check_scheme
from tidegate.storage.state.key_groups import MAX_PARALLELISM_LIMIT
from tidegate.storage.units import parse_duration_ms, parse_size_bytes

INTERVAL_MS_MIN = 10
"""Intervals below this switch periodic checkpoints off, and no timeout may be below it (both as in Flink)."""

LEASE_MS_MIN = 1_000
HEARTBEAT_MS_MIN = 100
DEBLOAT_TARGET_MS_MIN = 10
STANDBYS_MAX = 1_000
PORT_MAX = 65_535
STATE_SIZE_MAX = 64 * 2**20

_IN_MEMORY = (
    "for state in memory write state.backend.type: hashmap, and for checkpoints that are kept in the coordinator's "
    "memory state.checkpoint-storage: jobmanager"
)
_OF_FLINK = {
    ("backend", "filesystem"): "for state in memory with checkpoints in files write state.backend.type: hashmap",
    ("backend", "memory"): _IN_MEMORY,
    ("backend", "jobmanager"): _IN_MEMORY,
    ("retention", "retain_on_failure"): "to keep the checkpoints of failed jobs alone write DELETE_ON_CANCELLATION",
    ("retention", "never_retain_after_termination"): "write NO_EXTERNALIZED_CHECKPOINTS",
}
"""Values of Flink that tidegate has not, by setting, and what to write instead."""

_BACKENDS = {"columnar": "columnar", "hashmap": "columnar", "rocksdb": "rocksdb"}


def label(info: ValidationInfo) -> str:
    """How messages name the setting."""
    return titled(info.field_name or "")


def duration(value: str | timedelta | int, info: ValidationInfo) -> int:
    """Milliseconds."""
    return parse_duration_ms(value, setting=label(info))


def interval(value: str | timedelta | int | None, info: ValidationInfo) -> int | None:
    """Milliseconds, or None for no periodic checkpoints."""
    interval_ms = None if value is None else duration(value, info)
    return None if interval_ms is None or interval_ms < INTERVAL_MS_MIN else interval_ms


def timeout(value: str | timedelta | int, info: ValidationInfo) -> int:
    """Milliseconds, at least 10."""
    return _at_least(INTERVAL_MS_MIN, value, info)


def lease(value: str | timedelta | int, info: ValidationInfo) -> int:
    """Milliseconds, at least 1,000: a slow renewal must not come too late."""
    return _at_least(LEASE_MS_MIN, value, info)


def heartbeat(value: str | timedelta | int, info: ValidationInfo) -> int:
    """Milliseconds, at least 100: a busy machine must not look like a hung process."""
    return _at_least(HEARTBEAT_MS_MIN, value, info)


def call_timeout(value: str | timedelta | int | None, info: ValidationInfo) -> int | None:
    """Milliseconds, or None for the default."""
    return None if value is None else heartbeat(value, info)


def debloat_target(value: str | timedelta | int, info: ValidationInfo) -> int:
    """Milliseconds, at least 10: a receiver must not run dry before the sender hears of its credit."""
    return _at_least(DEBLOAT_TARGET_MS_MIN, value, info, ", or debloat: false")


def _at_least(least_ms: int, value: str | timedelta | int, info: ValidationInfo, advice: str = "") -> int:
    found_ms = duration(value, info)
    if found_ms < least_ms:
        raise ConfigurationError(f"{label(info)}: {found_ms} ms is too short; give {least_ms} ms or more{advice}")
    return found_ms


def size(value: str | int, info: ValidationInfo) -> int:
    """Bytes."""
    return parse_size_bytes(value, setting=label(info))


def whole(value: object, info: ValidationInfo, what: str, at_least: int) -> int:
    """A whole number from `at_least` up."""
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ConfigurationError(f"{label(info)}: {value!r} is no {what}; give a whole number from {at_least} up")
    return value


def any_number(value: object, info: ValidationInfo) -> int:
    """A number of checkpoints, 0 or more."""
    if value == -1:
        raise ConfigurationError(f"{label(info)}: -1 is no number of checkpoints; for any number write {2**31 - 1}")
    return whole(value, info, "number of checkpoints", at_least=0)


def at_least_one(value: object, info: ValidationInfo) -> int:
    """A number of checkpoints, 1 or more."""
    return whole(value, info, "number of checkpoints", at_least=1)


def checkpoint_id(value: object, info: ValidationInfo) -> int | None:
    """The number of a checkpoint, or None."""
    return None if value is None else whole(value, info, "number of a checkpoint (the N of chk-N)", at_least=1)


def standbys(value: object, info: ValidationInfo) -> Standbys | None:
    """A number of spare processes, "auto", "warm", or None."""
    return None if value is None else spare_processes(value, label(info))


def spare_processes(value: object, setting: str) -> Standbys:
    """A number of spare processes, "auto" or "warm"."""
    if lowered(value) == "auto":
        return "auto"
    if lowered(value) == "warm":
        return "warm"
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= STANDBYS_MAX:
        raise ConfigurationError(
            f"{setting}: {value!r} is no number of spare processes; give a whole number from 0 to {STANDBYS_MAX}, "
            "'auto' or 'warm'"
        )
    return value


def place(value: object, info: ValidationInfo) -> str | None:
    """A folder or URL that tidegate can store at, or None."""
    if value is None:
        return None
    found = location(value, label(info))
    try:
        check_scheme(found)
    except ConfigurationError as error:
        raise ConfigurationError(f"{label(info)}: {error}") from None
    return found


def switch(value: object, info: ValidationInfo) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise ConfigurationError(f"{label(info)}: {value!r} is neither true nor false")
    return value


def lowered(value: object) -> object:
    """In lower case, with underscores: Flink writes its choices in capitals, its users in either way."""
    return value.lower().replace("-", "_") if isinstance(value, str) else value


def choice(value: object, info: ValidationInfo, choices: Iterable[str]) -> str:
    """The choice that was meant, in capitals or not."""
    for known in choices:
        if known == lowered(value):
            return known
    meant = _OF_FLINK.get((info.field_name or "", str(lowered(value))))
    raise ConfigurationError(
        f"{label(info)}: {value!r} is none of {', '.join(map(repr, choices))}" + (f"; {meant}" if meant else "")
    )


def mode(value: object, info: ValidationInfo) -> str:
    """The mode of checkpoints."""
    return choice(value, info, ("exactly_once", "at_least_once"))


def retention(value: object, info: ValidationInfo) -> str:
    """Which checkpoints stay when the job is over."""
    return choice(value, info, ("retain_on_cancellation", "delete_on_cancellation", "no_externalized_checkpoints"))


def failover(value: object, info: ValidationInfo) -> str:
    """What restarts when a task has failed."""
    return choice(value, info, ("region", "full"))


def backend(value: object, info: ValidationInfo) -> str:
    """The state backend; Flink's `hashmap` is kept as `columnar`."""
    if lowered(value) == "forst":
        raise ConfigurationError(
            f"{label(info)}: {value!r} is not available; write 'columnar' (in memory; Flink's 'hashmap' means the "
            "same) or 'rocksdb' (on local disk)"
        )
    return _BACKENDS[choice(value, info, _BACKENDS)]


def compression(value: object, info: ValidationInfo) -> str | None:
    """The compression of state files, or None. True, which Flink's switch may be, chooses the fast one."""
    if value is None or isinstance(value, bool):
        return "lz4" if value else None
    found = choice(value, info, ("none", "lz4", "zstd"))
    return None if found == "none" else found


def checkpoint_storage(value: object, info: ValidationInfo) -> str:
    """Where state of checkpoints goes."""
    return choice(value, info, ("filesystem", "jobmanager"))


def state_size(value: str | int, info: ValidationInfo) -> int:
    """Bytes, from 1 to 64 MiB: the coordinator holds the states of all subtasks, of all checkpoints that are kept."""
    size_bytes = positive_size(value, info)
    if size_bytes > STATE_SIZE_MAX:
        raise ConfigurationError(f"{label(info)}: {value!r} is more than 64mb; choose a file system for checkpoints")
    return size_bytes


def positive_size(value: str | int, info: ValidationInfo) -> int:
    """Bytes, at least 1."""
    size_bytes = size(value, info)
    if size_bytes < 1:
        raise ConfigurationError(f"{label(info)}: {value!r} is nothing; give 1 byte or more")
    return size_bytes


def optional_size(value: str | int | None, info: ValidationInfo) -> int | None:
    """Bytes, at least 1; or None."""
    return None if value is None else positive_size(value, info)


def positive(value: object, info: ValidationInfo) -> int:
    """A number, 1 or more."""
    return whole(value, info, "number", at_least=1)


def optional_positive(value: object, info: ValidationInfo) -> int | None:
    """A number, 1 or more; or None."""
    return None if value is None else positive(value, info)


def parallelism(value: object, info: ValidationInfo) -> int | None:
    """A number of subtasks, or None."""
    return None if value is None else whole(value, info, "number of subtasks", at_least=1)


def max_parallelism(value: object, info: ValidationInfo) -> int | None:
    """A number of key groups; or None."""
    number = optional_positive(value, info)
    if number is not None and number > MAX_PARALLELISM_LIMIT:
        raise ConfigurationError(f"{label(info)}: {value!r} is too much; it is from 1 to {MAX_PARALLELISM_LIMIT:,}")
    return number


def name(value: object, info: ValidationInfo) -> str | None:
    """A text that can be printed; or None."""
    if value is not None:
        check_name(label(info), "it", value)
    return cast("str | None", value)


def host(value: object, info: ValidationInfo) -> str:
    """The name or the address of a host."""
    if not isinstance(value, str) or not value or not value.isprintable() or " " in value:
        raise ConfigurationError(f"{label(info)}: {value!r} is neither the name nor the address of a host")
    return value


def port(value: object, info: ValidationInfo) -> int:
    """A port, or 0."""
    number = whole(value, info, "port", at_least=0)
    if number > PORT_MAX:
        raise ConfigurationError(f"{label(info)}: {number} is no port: the highest is {PORT_MAX}")
    return number


def restore(value: object, info: ValidationInfo) -> str | None:
    """`latest`, `latest_or_fresh`, a place, or None."""
    if value is None or (isinstance(value, str) and value and "/" not in value):
        return value
    return location(value, label(info))


def progress(value: object, info: ValidationInfo) -> str:
    """How progress is shown. YAML reads `off` as false."""
    return choice("off" if value is False else value, info, ("auto", "bar", "lines", "off"))


def local_aggregation(value: object, info: ValidationInfo) -> str:
    """Whether rows are combined. YAML reads `on` and `off` as booleans; Flink has words of its own."""
    if isinstance(value, str):
        value = {"AUTO": "auto", "TWO_PHASE": "on", "ONE_PHASE": "off"}.get(value.upper(), value)
    elif isinstance(value, bool):
        value = "on" if value else "off"
    return choice(value, info, ("auto", "on", "off"))


def target(value: object, info: ValidationInfo) -> str:
    """Where jobs run."""
    return choice(value, info, ("local", "ray", "raydp", "on_spark"))


def placement(value: object, info: ValidationInfo) -> str:
    """How slots lie on nodes."""
    return choice(value, info, ("spread", "pack", "strict_pack"))


_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def level(value: object, info: ValidationInfo) -> str | None:
    """A level of Python's logging, or None."""
    written = value.upper() if isinstance(value, str) else value
    if written is not None and written not in _LEVELS:
        raise ConfigurationError(f"{label(info)}: {value!r} is none of {', '.join(_LEVELS)}")
    return written


def levels(value: object, info: ValidationInfo) -> dict[str, str]:
    """Levels by the name of their logger."""
    found = {name: level(of, info) for name, of in options(value, info).items()}
    if any(of is None for of in found.values()):
        raise ConfigurationError(f"{label(info)}: {value!r} has a logger without a level")
    return cast("dict[str, str]", found)


def log_format(value: object, info: ValidationInfo) -> str:
    """How a line of the log looks."""
    return choice(value, info, ("text", "json"))


def options(value: object, info: ValidationInfo) -> dict[str, object]:
    """Names and values of another library, which checks them itself."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ConfigurationError(f"{label(info)}: {value!r} is no mapping of names to values")
    return dict(value)


def ray_options(value: object, info: ValidationInfo) -> dict[str, object]:
    """Arguments of `ray.init`, of which `runtime_env` is a mapping."""
    found = options(value, info)
    check_runtime_env_is_mapping(found, label(info))
    return found


def check_runtime_env_is_mapping(ray_options: Mapping[str, object], where: str) -> None:
    """Raise ConfigurationError for a `runtime_env` that is no mapping. None stands for none."""
    found = ray_options.get("runtime_env")
    if found is not None and not isinstance(found, Mapping):
        raise ConfigurationError(
            f"{where}: runtime_env is {found!r}, and not a mapping such as {{'env_vars': {{'A': 'b'}}}}"
        )


def spark_configs(value: object, info: ValidationInfo) -> dict[str, str]:
    """Settings of Spark, all of them texts, as Spark has them."""
    found = {key if key.startswith("spark.") else f"spark.{key}": of for key, of in options(value, info).items()}
    wrong = [key for key, of in found.items() if not isinstance(of, str | int | float)]
    if wrong:
        raise ConfigurationError(f"{label(info)}: {wrong[0]} is {found[wrong[0]]!r}, and no text or number")
    return {key: str(of).lower() if isinstance(of, bool) else str(of) for key, of in found.items()}

"""Reads `restart-strategy.*`, Flink's keys of the restart strategies, into a `RestartStrategy`.

Values and defaults are Flink's. A setting of a strategy that is not chosen is an error, because it would have no
effect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tidegate.api.config.setting import SettingError
from tidegate.api.config.setting_kinds import MS_UNITS, in_units
from tidegate.recovery.restart_strategy import ExponentialDelay, FailureRate, FixedDelay, NoRestart, RestartStrategy
from tidegate.storage.errors import ConfigurationError

TYPE_KEYS = ("restart-strategy", "restart-strategy.type")
"""The two keys that choose the restart strategy: the key of Flink 1, then the key of Flink 2."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """One restart strategy: its class, its constructor, other names of the strategy, and the constructor argument that
    each of its keys sets.
    """

    made: type[RestartStrategy]
    make: Callable[..., RestartStrategy]
    names: tuple[str, ...]
    arguments: Mapping[str, str]
    defaults: Mapping[str, object]
    """Values of Flink's defaults for arguments that the Python constructor requires."""


_KINDS = {
    "none": _Kind(NoRestart, RestartStrategy.none, ("off", "disable"), {}, {}),
    "fixed-delay": _Kind(
        FixedDelay,
        RestartStrategy.fixed_delay,
        ("fixeddelay",),
        {"attempts": "attempts", "delay": "delay"},
        {"attempts": 1, "delay": "1s"},
    ),
    "exponential-delay": _Kind(
        ExponentialDelay,
        RestartStrategy.exponential_delay,
        ("exponentialdelay",),
        {
            "initial-backoff": "initial",
            "max-backoff": "maximum",
            "backoff-multiplier": "multiplier",
            "reset-backoff-threshold": "reset_after",
            "jitter-factor": "jitter",
            "attempts-before-reset-backoff": "attempts",
        },
        {},
    ),
    "failure-rate": _Kind(
        FailureRate,
        RestartStrategy.failure_rate,
        ("failurerate",),
        {"max-failures-per-interval": "failures", "failure-rate-interval": "interval", "delay": "delay"},
        {},
    ),
}

KIND_OF: Mapping[str, str] = MappingProxyType(
    {f"restart-strategy.{kind}.{key}": kind for kind, details in _KINDS.items() for key in details.arguments}
)
"""Maps each key to the restart strategy to which it belongs."""

RESTART_KEYS = (*TYPE_KEYS, *KIND_OF)
"""Keys of all restart strategies, and of their choice."""


def restart_from(settings: Mapping[str, object]) -> RestartStrategy | None:
    """Returns the restart strategy that these settings choose, or None if there are none. Their keys are in
    `RESTART_KEYS`.

    Without a type the strategy is exponential-delay, the default. Raises ConfigurationError for an unknown type, and
    for settings of another strategy.
    """
    types = [key for key in TYPE_KEYS if key in settings]
    if len(types) > 1:
        raise SettingError(f"{types[0]} and {types[1]} are one setting; give it once", tuple(types))
    own = {key: value for key, value in settings.items() if key in KIND_OF}
    if not types and not own:
        return None
    kind = _kind(types[0], settings[types[0]]) if types else "exponential-delay"
    details = _KINDS[kind]
    arguments = dict(details.defaults)
    for key, value in own.items():
        if KIND_OF[key] != kind:
            raise SettingError(
                f"{key} is given, but restart-strategy.type is {kind!r}: remove it, or choose {KIND_OF[key]!r}",
                (key, *types),
            )
        arguments[details.arguments[key.rpartition(".")[2]]] = value
    try:
        return details.make(**arguments)
    except ConfigurationError as error:
        named = tuple(key for key in own if f"({details.arguments[key.rpartition('.')[2]]})" in str(error))
        raise SettingError(f"restart-strategy.{kind}: {error}", named or tuple(own)) from error


def keys_of(strategy: RestartStrategy) -> dict[str, object]:
    """Returns the keys and values that choose this strategy. Durations are in ms."""
    kind = next(name for name, details in _KINDS.items() if isinstance(strategy, details.made))
    found: dict[str, object] = {TYPE_KEYS[-1]: kind}
    for key, argument in _KINDS[kind].arguments.items():
        name = argument if hasattr(strategy, argument) else f"{argument}_ms"
        found[f"restart-strategy.{kind}.{key}"] = getattr(strategy, name)
    return found


def default_of(key: str) -> object:
    """Returns the default value of a key of a restart strategy. Durations are in ms."""
    kind = KIND_OF[key]
    return keys_of(_KINDS[kind].make(**_KINDS[kind].defaults))[key]


def kind_of(settings: Mapping[str, object]) -> str | None:
    """Returns the restart strategy that the type among these settings names, or None without a type.

    Raises ConfigurationError for an unknown type.
    """
    types = [key for key in TYPE_KEYS if key in settings]
    return _kind(types[0], settings[types[0]]) if types else None


def _kind(key: str, value: object) -> str:
    # YAML reads `off` as false.
    written = "off" if value is False else value.lower().replace("_", "-") if isinstance(value, str) else None
    for kind, details in _KINDS.items():
        if written in (kind, *details.names):
            return kind
    raise SettingError(f"{key}: {value!r} is none of {', '.join(map(repr, _KINDS))}; give one of them", (key,))


def restart_text(key: str, value: object) -> str:
    """Returns a value of a restart strategy, formatted as it is written in YAML."""
    if value is None:
        return "null"
    is_ms = isinstance(value, int) and key.endswith(("delay", "backoff", "interval", "threshold"))
    is_ms = is_ms and not key.endswith("per-interval") and "attempts" not in key
    return in_units(int(str(value)), MS_UNITS) if is_ms else str(value)

"""`setting` declares a setting: its keys, its kind, its default and its meaning. A `Section` has several settings.

The declaration is the only place to change when a setting is added. The Python class, YAML files, environment
variables, `tidegate config check` and `docs/settings.md` follow from it. Rules:

- A setting may be given by its Python name or by any of its keys, at most once.
- A wrong value raises a SettingError, which names the settings concerned. A caller that has read the settings from a
  file can then add the file and line.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from tidegate.api.config.setting_kinds import Kind, in_units
from tidegate.storage.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Setting:
    """The declaration of one setting in a section."""

    keys: tuple[str, ...]
    """Keys of the setting in files. If there are two, the second one is the key that Flink 2 documents. Both are valid.
    """
    kind: Kind
    doc: str
    """Meaning of the setting, in Markdown, for the page `docs/settings.md`."""
    more: str | None
    """Name of a page under `docs/` that explains the setting in full."""
    is_open: bool
    """True if the value is a mapping that another library defines. Every key below its key then belongs to that
    library.
    """


def setting(*keys: str, kind: Kind, default: Any, doc: str, more: str | None = None, is_open: bool = False) -> Any:
    """Declares a setting of a section: `retries: int = setting("task.retries", kind=number(), default=3, doc="…")`."""
    declared = Setting(keys, kind, doc, more, is_open)
    return Field(default=default, description=doc, json_schema_extra=cast("dict[str, Any]", {"setting": declared}))


class SettingError(ConfigurationError):
    """An error about one or more settings.

    `settings` has their Python names, so that a caller can add the file and line.
    """

    def __init__(self, message: str, settings: tuple[str, ...]) -> None:
        super().__init__(message)
        self.settings = settings

    def __reduce__(self) -> tuple[type[SettingError], tuple[str, tuple[str, ...]]]:
        return SettingError, (str(self), self.settings)


class Section(BaseModel):
    """A group of settings.

    A subclass declares its settings as fields, and implements `check` to find settings that contradict each other.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __new__(cls, /, *values: object, **_: Any) -> Self:
        """Raises ConfigurationError for settings without names. A new `__init__` would hide the names of the
        settings from `inspect.signature` and from type checkers.
        """
        if values:
            raise ConfigurationError(
                f"{cls.__name__}({', '.join(map(repr, values))}): settings are given by name, such as "
                f"{cls.__name__}({next(iter(cls.settings()))}=...)"
            )
        return super().__new__(cls)

    def __setattr__(self, name: str, value: object) -> None:
        """Raises ConfigurationError, because settings never change: a job may already use them."""
        raise ConfigurationError(
            f"{name} of a {type(self).__name__} cannot be set afterwards; give it when you make one: "
            f"{type(self).__name__}({name}=...)"
        )

    @classmethod
    def settings(cls) -> dict[str, Setting]:
        """Returns the settings of the section by their Python names."""
        return {name: cast("Any", field.json_schema_extra)["setting"] for name, field in cls.model_fields.items()}

    @classmethod
    def title(cls, name: str) -> str:
        """Returns a text with the Python name and the keys of a setting, for errors."""
        return f"{name} ({' or '.join(cls.settings()[name].keys)})"

    @classmethod
    def text_of(cls, name: str, value: object) -> str:
        """Returns a stored value of a setting in the form in which it is written in YAML."""
        kind = cls.settings()[name].kind
        if value is None:
            return "null"
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, int) and kind.units:
            return in_units(value, kind.units)
        return yaml_text(value)

    def check(self) -> None:
        """Raises SettingError if settings of the section contradict each other."""

    def given(self) -> dict[str, object]:
        """Returns the settings that were given, by their Python names. Settings that were not given are omitted."""
        return cast("dict[str, object]", self.model_dump(exclude_unset=True))

    def contradiction(self, one: str, other: str, why: str) -> SettingError:
        """Returns the error for two settings that contradict each other. `why` has the reason and the advice."""
        pair = (f"{self.title(name)} is {getattr(self, name)!r}" for name in (one, other))
        return SettingError(f"{' but '.join(pair)}: {why}", (one, other))

    @field_validator("*", mode="wrap")
    @classmethod
    def _read_one(cls, value: object, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> object:
        name = info.field_name or ""
        try:
            return handler(cls.settings()[name].kind.read(value, cls.title(name)))
        except SettingError:
            raise
        except ConfigurationError as error:
            raise SettingError(str(error), (name,)) from error

    @model_validator(mode="wrap")
    @classmethod
    def _read_all(cls, data: object, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if isinstance(data, Mapping):
            data = cls._by_name(data)
        try:
            settings = handler(data)
        except ValidationError as error:
            raise cls._refusal(error) from error
        settings.check()
        return settings

    @classmethod
    def _refusal(cls, error: ValidationError) -> SettingError:
        """Returns the error for values that only pydantic has refused. It names each setting and its value."""
        found = {str(each["loc"][0]) if each["loc"] else "": each for each in error.errors()}
        texts = [
            f"{cls.title(name) if name else cls.__name__}: {each['input']!r} is refused ({each['msg']}); correct it"
            for name, each in found.items()
        ]
        return SettingError("; ".join(texts), tuple(name for name in found if name))

    @classmethod
    def _by_name(cls, data: Mapping[object, object]) -> dict[str, object]:
        """Returns the settings by their Python names.

        Raises ConfigurationError for an unknown setting, or for one that is given twice.
        """
        declared = cls.settings()
        names = {name: name for name in declared} | {key: name for name, each in declared.items() for key in each.keys}
        given: dict[str, str] = {}
        settings: dict[str, object] = {}
        for spelling, value in data.items():
            name = names.get(str(spelling))
            if name is None:
                raise unknown_setting(str(spelling), names)
            if name in given:
                raise SettingError(f"{given[name]} and {spelling} are one setting; give it once", (name,))
            given[name] = str(spelling)
            settings[name] = value
        return settings


def yaml_text(value: object) -> str:
    """Returns a value as it is written in YAML. Plain words have no quotes."""
    import json

    is_plain = (
        isinstance(value, str)
        and value.replace("_", "a").replace("-", "a").isalnum()
        and value not in ("off", "on")  # booleans in YAML
    )
    return json.dumps(value, default=str) if isinstance(value, Mapping | str) and not is_plain else str(value)


def unknown_setting(name: str, known: Iterable[str], kind: str = "setting") -> ConfigurationError:
    """Returns the error for a setting whose name is not in `known`. The error suggests the nearest known name. `kind`
    is what the name is called in the error.
    """

    def likeness(other: str) -> float:
        # Users remember the last part of a key best, so it counts as much as the whole key.
        parts = name.rpartition(".")[2].replace("_", "-"), other.rpartition(".")[2].replace("_", "-")
        return max(difflib.SequenceMatcher(None, name, other).ratio(), difflib.SequenceMatcher(None, *parts).ratio())

    nearest = max(known, key=likeness)
    return ConfigurationError(
        f"unknown {kind} {name!r}; the nearest known one is {nearest!r}. Correct it, or remove it"
    )

"""`Section`: a group of settings that are checked together. Each has a Python name, and one key or two.

Rules:

- A setting may be given by its Python name or by any of its keys, and once.
- What is wrong raises a SettingError, which says which settings it is about, so that whoever has read them from a file
  can say from where.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from tidegate.api.config.sections.setting_names import setting_keys, titled, unknown_setting
from tidegate.storage.errors import ConfigurationError


class SettingError(ConfigurationError):
    """Something is wrong with these settings, named as Python names them."""

    def __init__(self, message: str, settings: tuple[str, ...]) -> None:
        super().__init__(message)
        self.settings = settings

    def __reduce__(self) -> tuple[type[SettingError], tuple[str, tuple[str, ...]]]:
        return SettingError, (str(self), self.settings)


class Section(BaseModel):
    """A group of settings. A subclass has a field for each of them, and checks them together in `check`."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    def check(self) -> None:
        """Raise SettingError for settings that contradict each other."""

    def given(self) -> dict[str, object]:
        """What was given, under Python names; what has its default because nobody has said otherwise is left out."""
        return cast("dict[str, object]", self.model_dump(exclude_unset=True))

    def contradiction(self, one: str, other: str, why: str) -> SettingError:
        """The error for two settings that cannot both be kept."""
        pair = (f"{titled(name)} is {getattr(self, name)!r}" for name in (one, other))
        return SettingError(f"{' but '.join(pair)}: {why}", (one, other))

    @field_validator("*", mode="wrap")
    @classmethod
    def _of_one(cls, value: object, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> object:
        try:
            return handler(value)
        except SettingError:
            raise
        except ConfigurationError as error:
            raise SettingError(str(error), (info.field_name or "",)) from error

    @model_validator(mode="wrap")
    @classmethod
    def _of_all(cls, data: object, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if isinstance(data, Mapping):
            data = cls._by_name(data)
        try:
            settings = handler(data)
        except ValidationError as error:
            names = tuple(str(found["loc"][0]) for found in error.errors() if found["loc"])
            raise SettingError(f"wrong settings: {error}", names) from error
        settings.check()
        return settings

    @classmethod
    def _by_name(cls, data: Mapping[object, object]) -> dict[str, object]:
        """The same settings under their Python names. ConfigurationError for unknown and doubled ones."""
        fields = cls.model_fields
        names = {name: name for name in fields} | {key: name for name in fields for key in setting_keys(name)}
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

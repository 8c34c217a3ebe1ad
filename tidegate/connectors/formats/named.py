"""Maps the names of payload formats to `Format` objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

from tidegate.connectors.formats.avro import AvroFormat
from tidegate.connectors.formats.csv import CsvFormat
from tidegate.connectors.formats.debezium import DebeziumFormat
from tidegate.connectors.formats.format import Format
from tidegate.connectors.formats.json import JsonFormat
from tidegate.connectors.formats.json_schema import JsonSchemaFormat
from tidegate.connectors.formats.protobuf import ProtobufFormat
from tidegate.connectors.formats.raw import RawFormat
from tidegate.connectors.formats.registry import SchemaRegistry
from tidegate.connectors.formats.upsert import UpsertFormat
from tidegate.storage.errors import ConfigurationError

FormatName: TypeAlias = Literal["json", "avro", "json_schema", "protobuf", "csv", "raw", "text", "debezium", "upsert"]
PayloadFormat: TypeAlias = "FormatName | Format"
"""A format of keys or values as users give it: a name or a `Format`. "debezium" and "upsert" are for values only."""
_REGISTERED: Mapping[str, Callable[[SchemaRegistry | str | None], Format]] = {
    "avro": lambda registry: AvroFormat(registry=registry),
    "json_schema": lambda registry: JsonSchemaFormat(registry=registry),
    "protobuf": lambda registry: ProtobufFormat(registry=registry),
    "debezium": lambda registry: DebeziumFormat(registry=registry),
}
"""Formats that can have the schemas of a registry."""
_OTHERS: Mapping[str, Callable[[], Format]] = {
    "json": JsonFormat,
    "csv": CsvFormat,
    "raw": RawFormat,
    "text": lambda: RawFormat(text=True),
    "upsert": UpsertFormat,
}


def format_named(given: object, registry: SchemaRegistry | str | None, method: str, setting: str = "format") -> Format:
    """Returns the format for a name, or a given `Format` unchanged. Raises ConfigurationError for any other value.

    `registry` is passed to a format that uses one. `setting`: the name of the parameter, for errors.
    """
    if isinstance(given, Format):
        return given
    if isinstance(given, str) and given in _REGISTERED:
        return _REGISTERED[given](registry)
    if isinstance(given, str) and given in _OTHERS:
        return _OTHERS[given]()
    names = ", ".join(repr(name) for name in (*_OTHERS, *_REGISTERED))
    raise ConfigurationError(f"{method}({setting}={given!r}): give one of {names}, or a format such as AvroFormat(...)")


def check_registry(registry: SchemaRegistry | str | None, method: str, *given: object) -> None:
    """Raises ConfigurationError if a registry is given although none of the formats named in `given` uses one."""
    if registry is None or any(isinstance(each, str) and each in _REGISTERED for each in given):
        return
    if any(isinstance(each, Format) for each in given):
        raise ConfigurationError(
            f"{method}(registry=): give the registry to the format, as in AvroFormat(registry=...)"
        )
    raise ConfigurationError(f"{method}(registry=) does not apply to format={given[0]!r}; remove it")

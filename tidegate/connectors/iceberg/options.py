"""Options of Iceberg tables: the catalog, the partitions of a new table, and the check of columns against a table."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa

from tidegate.storage.errors import ConfigurationError, TableError
from tidegate.storage.extras import load
from tidegate.storage.schemas.arrow_types import decoded_type, settled_type

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.schema import Schema

CatalogLike: TypeAlias = "str | Mapping[str, str] | Catalog"
"""A catalog as a user gives it: its name in pyiceberg's configuration, its properties (with `name`), or a pyiceberg
object.
"""


@dataclass(frozen=True, slots=True)
class CatalogOptions:
    """The name and properties with which each process opens the catalog.

    `repr` omits the properties, which may have passwords.
    """

    name: str
    properties: tuple[tuple[str, str], ...] = field(repr=False)

    @staticmethod
    def of(catalog: CatalogLike, where: str) -> CatalogOptions:
        """Converts a user's `catalog` argument to options. Raises ConfigurationError if the catalog cannot be opened.

        The configuration of pyiceberg (`.pyiceberg.yaml`, `PYICEBERG_CATALOG__…`) is read here, where the program is
        submitted, so that other machines need none.
        """
        pyiceberg = imported()
        if isinstance(catalog, str):
            try:
                found = pyiceberg.load_catalog(catalog)
            except ValueError as error:
                raise ConfigurationError(
                    f"{where}: pyiceberg cannot open the catalog {catalog!r}: {error}. Describe it in .pyiceberg.yaml, "
                    "or give its properties, such as catalog={'type': 'rest', 'uri': 'http://…'}"
                ) from error
            return CatalogOptions(found.name, _texts(found.properties, where))
        if isinstance(catalog, Mapping):
            given = dict(catalog)
            name = str(given.pop("name", "default"))
            return CatalogOptions(name, _texts(given, where))
        if isinstance(catalog, pyiceberg.Catalog):
            return CatalogOptions(catalog.name, _texts(catalog.properties, where))
        raise ConfigurationError(
            f"{where}: catalog= is of type {type(catalog).__name__}, which is not a catalog: give a name, properties, "
            "or an object of pyiceberg"
        )

    def open(self) -> Catalog:
        """Opens the catalog with pyiceberg."""
        catalog: Catalog = imported().load_catalog(self.name, **dict(self.properties))
        return catalog


def imported() -> Any:
    """Imports and returns `pyiceberg.catalog`. Raises ConfigurationError with the install command if it is missing."""
    return load("an Iceberg table", "iceberg", "pyiceberg.catalog")


def _texts(properties: Mapping[str, Any], where: str) -> tuple[tuple[str, str], ...]:
    wrong = [name for name, value in properties.items() if not isinstance(value, str | int | bool | float)]
    if wrong:
        raise ConfigurationError(
            f"{where}: the property {wrong[0]!r} of catalog= has a value of type "
            f"{type(properties[wrong[0]]).__name__}; give a string"
        )
    return tuple(sorted((name, str(value)) for name, value in properties.items()))


_TRANSFORM = re.compile(r"(year|month|day|hour)\((\w+)\)|(bucket|truncate)\((\d+), *(\w+)\)|(\w+)", re.ASCII)
PARTITION_ADVICE = "give columns, day(column) (or year, month, hour), bucket(16, column) or truncate(8, column)"


def partition_transforms(partition_by: Sequence[str], where: str) -> list[tuple[str, str]]:
    """Parses `partition_by` to the column and the transform (as pyiceberg's text) of each partition field.

    Raises ConfigurationError.
    """
    found = []
    for given in partition_by:
        match = _TRANSFORM.fullmatch(given) if isinstance(given, str) else None
        if match is None:
            raise ConfigurationError(
                f"{where}: partition_by={given!r} is not a column or a transform of one: {PARTITION_ADVICE}"
            )
        time, of_time, number, width, of_number, column = match.groups()
        if time:
            found.append((of_time, time))
        elif number:
            found.append((of_number, f"{number}[{width}]"))
        else:
            found.append((column, "identity"))
    return found


def check_columns(table: Schema, stream: pa.Schema, where: str) -> None:
    """Raises TableError unless the table can store every column of the stream unchanged, and no required column is
    missing.
    """
    from pyiceberg.io.pyarrow import schema_to_pyarrow

    wanted = {field.name: field for field in table.fields}
    if unknown := [name for name in stream.names if name not in wanted]:
        raise TableError(
            f"{where} has no column {unknown[0]!r}, only {', '.join(wanted)}: remove it by select(), or add it to the "
            "table"
        )
    missing = [name for name, field in wanted.items() if field.required and name not in stream.names]
    if missing:
        raise TableError(f"{where} requires the column {missing[0]!r}, which the stream lacks: add it to the stream")
    for column in stream:
        type_there = schema_to_pyarrow(wanted[column.name].field_type, include_field_ids=False)
        if not fits(column.type, type_there):
            raise TableError(
                f"{where} has the column {column.name!r} as {wanted[column.name].field_type}, and the stream has "
                f"{column.type}: cast it to {settled_type(type_there)}"
            )


def fits(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Returns whether every value of type `found` can be stored in an Iceberg column with the Arrow type `wanted`."""
    found, wanted = settled_type(decoded_type(found)), settled_type(wanted)
    types = pa.types
    if found.equals(wanted):
        return True
    if types.is_list(found) and types.is_list(wanted):
        return fits(found.value_type, wanted.value_type)
    if types.is_map(found) and types.is_map(wanted):
        return fits(found.key_type, wanted.key_type) and fits(found.item_type, wanted.item_type)
    if types.is_struct(found) and types.is_struct(wanted):
        return [field.name for field in found] == [field.name for field in wanted] and all(
            fits(one.type, other.type) for one, other in zip(found, wanted, strict=True)
        )
    if types.is_integer(found) and types.is_integer(wanted):
        signed_bits = found.bit_width + (0 if types.is_signed_integer(found) else 1)
        return bool(signed_bits <= wanted.bit_width)
    if types.is_floating(found) and types.is_floating(wanted):
        return bool(found.bit_width <= wanted.bit_width)
    if types.is_decimal(found) and types.is_decimal(wanted):
        return bool(found.scale == wanted.scale and found.precision <= wanted.precision)
    if types.is_timestamp(found) and types.is_timestamp(wanted):
        return found.unit in ("s", "ms", "us") and (found.tz is None) == (wanted.tz is None)
    if types.is_time(found) and types.is_time(wanted):
        return found.unit in ("s", "ms", "us")
    return False

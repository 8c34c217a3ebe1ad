"""Decides whether tidegate may write to a Delta table that others have given features; pure.

A Delta table states in its log what every writer must do: keep CHECK constraints, compute generated columns, use the
names of a column mapping. tidegate writes plain Parquet files with the job's values. Rules:

- A table is refused where a plain file would break what the table promises, or where readers would see other values.
- A feature that the table only *could* use does not matter: constraints that nobody has defined, a mapping that is off.
- A feature that is not known here is refused by name. Its rules came after this module.

Rules of each feature: https://github.com/delta-io/delta/blob/master/PROTOCOL.md, "Requirements for Writers".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

WRITER_VERSION_MAX = 7
READER_VERSION_MAX = 3

_PLAIN_FILES_SUFFICE = frozenset(
    {
        "appendOnly",
        "changeDataFeed",
        "checkConstraints",
        "columnMapping",
        "deletionVectors",
        "generatedColumns",
        "invariants",
        "timestampNtz",
        "v2Checkpoint",
    }
)
"""Features that need nothing of an append, unless a column or a property uses them; `_used` looks for those."""

_NEEDED = {
    "allowColumnDefaults": "column defaults",
    "catalogManaged": "commits through a catalog",
    "clustering": "liquid clustering: each file needs statistics of the clustering columns",
    "domainMetadata": "domain metadata",
    "icebergCompatV1": "files that Iceberg reads too",
    "icebergCompatV2": "files that Iceberg reads too",
    "identityColumns": "identity columns, whose values the table gives",
    "inCommitTimestamp": "in-commit timestamps",
    "materializePartitionColumns": "partition columns in the files as well",
    "rowTracking": "row tracking: each file needs the ids of its rows",
    "typeWidening": "type widening",
    "vacuumProtocolCheck": "a check of the protocol before VACUUM",
}

_ELSEWHERE = (
    "write to another url. Or let Spark append, in for_each_checkpoint: "
    'df.write.format("delta").mode("append").save(url)'
)

LEGACY_IDENTITY_VERSION = 6
"""The writer version that stands for identity columns, in tables without a list of features."""


def refusal(
    min_reader_version: int,
    min_writer_version: int,
    writer_features: Iterable[str],
    properties: Mapping[str, str],
    schema: Mapping[str, Any],
) -> str | None:
    """Returns what keeps tidegate from writing to a table, and what to do about it; None if nothing does.

    `properties` are those of the table (`delta.…`), `schema` is its schema as the log has it, read from JSON.
    """
    if used := _used(properties, schema):
        return used
    if min_writer_version > WRITER_VERSION_MAX or min_reader_version > READER_VERSION_MAX:
        return (
            f"needs writers of version {min_writer_version} and readers of version {min_reader_version} of the "
            f"protocol, of which tidegate knows {WRITER_VERSION_MAX} and {READER_VERSION_MAX}: {_ELSEWHERE}"
        )
    features = set(writer_features)
    if min_writer_version == LEGACY_IDENTITY_VERSION:
        features.add("identityColumns")
    if unknown := sorted(features - _PLAIN_FILES_SUFFICE):
        named = "; ".join(f"{name} ({_NEEDED[name]})" if name in _NEEDED else name for name in unknown)
        return (
            f"has the writer feature {named}, which tidegate does not write: take it off (ALTER TABLE ... DROP FEATURE "
            f"{unknown[0]}), or {_ELSEWHERE}"
        )
    return None


def _used(properties: Mapping[str, str], schema: Mapping[str, Any]) -> str | None:
    """What a property or a column of the table asks of each appended row or file, in words."""
    mapping = properties.get("delta.columnMapping.mode", "none")
    if mapping.lower() != "none":
        return (
            f"has column mapping (delta.columnMapping.mode = {mapping}): its files name the columns otherwise than the "
            f"table, and readers would find no values in tidegate's. {_upper(_ELSEWHERE)}"
        )
    prefix = "delta.constraints."
    for key, condition in sorted(properties.items()):
        if key.lower().startswith(prefix):
            name = key[len(prefix) :]
            return (
                f"has the CHECK constraint {name} ({condition}), which tidegate does not check: drop it (ALTER TABLE "
                f"... DROP CONSTRAINT {name}) and filter the stream, or {_ELSEWHERE}"
            )
    if (kept := properties.get("delta.setTransactionRetentionDuration")) is not None:
        return (
            f"forgets identifiers of transactions (delta.setTransactionRetentionDuration = {kept}). By its identifier "
            "tidegate knows which rows are there already: unset the property (ALTER TABLE ... UNSET TBLPROPERTIES)"
        )
    for path, metadata in _columns(schema):
        if (expression := metadata.get("delta.generationExpression")) is not None:
            return (
                f"has the generated column {path} ({expression}), whose values tidegate does not compute: {_ELSEWHERE}"
            )
        if any(key.startswith("delta.identity.") for key in metadata):
            return f"has the identity column {path}, whose values only the table may give: {_ELSEWHERE}"
        if (rule := metadata.get("delta.invariants")) is not None:
            return f"has the invariant {rule} of column {path}, which tidegate does not check: {_ELSEWHERE}"
        if (declared := metadata.get("__CHAR_VARCHAR_TYPE_STRING")) is not None:
            return (
                f"declares column {path} as {declared}, and tidegate does not check the lengths of strings: make it a "
                f"string (ALTER TABLE ... ALTER COLUMN {path} TYPE STRING), or {_ELSEWHERE}"
            )
    return None


def _columns(data_type: object, path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each column, and each field of a struct in it, by its path, with the metadata that the log has of it."""
    if not isinstance(data_type, Mapping):
        return
    for field in data_type.get("fields", ()):
        below = f"{path}.{field['name']}".lstrip(".")
        yield below, field.get("metadata") or {}
        yield from _columns(field["type"], below)
    for part in ("elementType", "keyType", "valueType"):
        yield from _columns(data_type.get(part), path)


def _upper(text: str) -> str:
    return text[0].upper() + text[1:]

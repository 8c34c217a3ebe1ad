"""The manifest of a staged DataFrame: it turns a folder of Parquet files into a source.

`stage_dataframe` creates it, `ParquetSource.open` reads it. Rules:
* It is created once, by a conditional create, when every file is complete. So a folder holds a whole staged DataFrame,
  or none.
* File names are relative to the folder's url.
* It has a checksum of each file, and one of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from tidegate.storage.codec import decode, encode, wire
from tidegate.storage.errors import AlreadyExistsError, CorruptionError, NotFoundError
from tidegate.storage.files.envelope import seal, unseal
from tidegate.storage.files.store import Store

MANIFEST_PATH = "_staged"
MANIFEST_VERSION = 1

_MAGIC = b"TGSTAGED"


@wire
@dataclass(frozen=True, slots=True)
class StagedFile:
    """One Parquet file. `checksum` is that of its bytes: `xxh3:` and 16 hex digits."""

    path: str
    rows: int
    size_bytes: int
    checksum: str


@wire
@dataclass(frozen=True, slots=True)
class StagedManifest:
    """The files of a staged DataFrame, in the order of its partitions, and their common schema."""

    schema: pa.Schema
    files: tuple[StagedFile, ...]


def write_manifest(store: Store, schema: pa.Schema, files: tuple[StagedFile, ...]) -> None:
    """Create the manifest. AlreadyExistsError if the folder has staged data already."""
    data = seal(_MAGIC, MANIFEST_VERSION, encode(StagedManifest(schema, files)))
    try:
        store.create(MANIFEST_PATH, data)
    except AlreadyExistsError as error:
        raise already_staged(store.url) from error


def already_staged(url: str) -> AlreadyExistsError:
    """The error for a folder that has staged data already."""
    return AlreadyExistsError(
        f"{url} holds a staged DataFrame already. Open it with ParquetSource.open(url), or stage to a new folder."
    )


def read_manifest(store: Store) -> StagedManifest:
    """The manifest of a folder.

    Raises NotFoundError if nothing was staged there, CorruptionError for damaged bytes, and CodecError for a manifest
    of a newer tidegate.
    """
    where = f"{store.url}/{MANIFEST_PATH}"
    try:
        data = store.read(MANIFEST_PATH)
    except NotFoundError as error:
        raise NotFoundError(
            f"no staged DataFrame at {store.url} ({MANIFEST_PATH} is not there): staging did not finish, or "
            "the url is another. Stage the DataFrame again."
        ) from error
    manifest = decode(unseal(_MAGIC, MANIFEST_VERSION, data, where))
    if not isinstance(manifest, StagedManifest):
        raise CorruptionError(f"{where} holds a {type(manifest).__name__}, not a manifest of staged data")
    return manifest

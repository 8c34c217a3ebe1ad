"""Encodes and decodes descriptions of data files as bytes, in pyiceberg's manifest format. Needs pyiceberg."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import Any

from pyiceberg.avro.file import AvroFile
from pyiceberg.io import InputFile, OutputFile
from pyiceberg.manifest import (
    DEFAULT_READ_VERSION,
    MANIFEST_ENTRY_SCHEMAS,
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestEntry,
    ManifestEntryStatus,
    write_manifest,
)
from pyiceberg.table.metadata import TableMetadata

_LOCATION = "memory:manifest"


def encoded_files(metadata: TableMetadata, files: Sequence[DataFile]) -> bytes:
    """Encodes data files as a manifest, with the table's current partition spec."""
    output = _Output(_LOCATION)
    with write_manifest(
        metadata.format_version, metadata.spec(), metadata.schema(), output, snapshot_id=0, avro_compression="null"
    ) as writer:
        for file in files:
            writer.add(
                ManifestEntry.from_args(
                    status=ManifestEntryStatus.ADDED,
                    snapshot_id=0,
                    sequence_number=None,
                    file_sequence_number=None,
                    data_file=file,
                )
            )
    return output.data


def decoded_files(manifest: bytes, spec_id: int) -> list[DataFile]:
    """Decodes the data files in a manifest. `spec_id` is their partition spec."""
    with AvroFile[ManifestEntry](
        _Input(_LOCATION, manifest),
        MANIFEST_ENTRY_SCHEMAS[DEFAULT_READ_VERSION],
        read_types={-1: ManifestEntry, 2: DataFile},
        read_enums={0: ManifestEntryStatus, 101: FileFormat, 134: DataFileContent},
    ) as entries:
        files = [entry.data_file for entry in entries]
    for file in files:
        file.spec_id = spec_id
    return files


class _Stream(BytesIO):
    """A memory stream that stores its bytes in `output` when it is closed."""

    def __init__(self, output: _Output) -> None:
        super().__init__()
        self._output = output

    def close(self) -> None:
        if not self.closed:
            self._output.data = self.getvalue()
        super().close()


class _Output(OutputFile):
    """An in-memory output file for pyiceberg that is written once."""

    data = b""

    def __len__(self) -> int:
        return len(self.data)

    def exists(self) -> bool:
        return False

    def to_input_file(self) -> InputFile:
        return _Input(self.location, self.data)

    def create(self, overwrite: bool = False) -> Any:
        return _Stream(self)


class _Input(InputFile):
    """An in-memory input file for pyiceberg."""

    def __init__(self, location: str, data: bytes) -> None:
        super().__init__(location)
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def exists(self) -> bool:
        return True

    def open(self, seekable: bool = True) -> Any:
        return BytesIO(self._data)

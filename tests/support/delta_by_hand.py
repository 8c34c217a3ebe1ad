"""Writes to a Delta table as other programs do, action by action: features, properties, deletion vectors.

No package here sets features that it cannot write itself, so the entries of the log are made by hand.
"""

from __future__ import annotations

import base64
import json
import struct
from pathlib import Path
from typing import Any
from urllib.parse import unquote

_B85 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"


def append_to_log(url: Path | str, *actions: dict[str, Any]) -> None:
    """One more entry of the log."""
    folder = Path(url) / "_delta_log"
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(action) + "\n" for action in actions)
    (folder / f"{len(list(folder.glob('*.json'))):020d}.json").write_text(text)


def newest(url: Path | str, kind: str) -> dict[str, Any]:
    """The newest action of a kind in the log."""
    found: dict[str, Any] = {}
    for path in sorted((Path(url) / "_delta_log").glob("*.json")):
        for line in path.read_text().splitlines():
            found = json.loads(line).get(kind, found)
    return found


def set_features(url: Path | str, *features: str, readers: bool = False) -> None:
    """Give the table features for writers, and for readers too."""
    protocol: dict[str, Any] = {"minReaderVersion": 1, "minWriterVersion": 7, "writerFeatures": list(features)}
    if readers:
        protocol |= {"minReaderVersion": 3, "readerFeatures": list(features)}
    append_to_log(url, {"protocol": protocol})


def set_version(url: Path | str, reader: int, writer: int) -> None:
    """Give the table versions of the protocol, without a list of features."""
    append_to_log(url, {"protocol": {"minReaderVersion": reader, "minWriterVersion": writer}})


def set_properties(url: Path | str, **properties: str) -> None:
    """Set properties of the table; `__` stands for a dot."""
    metadata = newest(url, "metaData")
    named = {key.replace("__", "."): value for key, value in properties.items()}
    append_to_log(url, {"metaData": metadata | {"configuration": metadata["configuration"] | named}})


def set_field_metadata(url: Path | str, column: str, metadata: dict[str, Any]) -> None:
    """Set what the log has of a column besides its type."""
    table = newest(url, "metaData")
    schema = json.loads(table["schemaString"])
    for field in schema["fields"]:
        if field["name"] == column:
            field["metadata"] = metadata
    append_to_log(url, {"metaData": table | {"schemaString": json.dumps(schema)}})


def delete_rows(url: Path | str, path: str, rows: int, deleted: list[int]) -> None:
    """Delete rows of a file of `rows` rows with a deletion vector, as Spark's DELETE does; the file stays."""
    bitmap = struct.pack("<4I", 12346, 1, 0 | (len(deleted) - 1) << 16, 16) + struct.pack(f"<{len(deleted)}H", *deleted)
    # Layout: magic number, number of bitmaps, and of each its key and the bitmap in Roaring's portable format.
    data = struct.pack("<iqi", 1681511377, 1, 0) + bitmap
    padded = data + b"\0" * (-len(data) % 4)
    vector = {
        "storageType": "i",
        "pathOrInlineDv": base64.b85encode(padded).decode().translate(str.maketrans(_B85, _Z85)),
        "sizeInBytes": len(padded),
        "cardinality": len(deleted),
    }
    entries = [p.read_text().splitlines() for p in sorted((Path(url) / "_delta_log").glob("*.json"))]
    adds = [action["add"] for lines in entries for line in lines if "add" in (action := json.loads(line))]
    add = next(add for add in adds if unquote(add["path"]) == path)
    file = {key: add[key] for key in ("path", "partitionValues", "size")} | {"dataChange": True}
    append_to_log(
        url,
        {"remove": file | {"deletionTimestamp": 1, "extendedFileMetadata": True}},
        {"add": file | {"modificationTime": 1, "stats": json.dumps({"numRecords": rows}), "deletionVector": vector}},
        {"commitInfo": {"timestamp": 1, "operation": "DELETE", "operationParameters": {}, "isBlindAppend": False}},
    )

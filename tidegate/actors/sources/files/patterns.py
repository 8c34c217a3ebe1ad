"""`FilePattern`: which files of a folder count, and what each is called.

Rules:

- `*` and `?` stand for anything but a slash, `[ab]` for one of these characters, `**/` for any number of folders. A
  pattern that ends with a slash means all files right in that folder.
- A name that begins with `_` or `.` is hidden, as for Spark, and so is all below such a folder. So whoever writes a
  file under a hidden name and renames it shows it only when it is complete.
- A file is called by its path below the folder: the part of the pattern before the first wildcard.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tidegate.storage.errors import ConfigurationError
from tidegate.storage.files.file_system import FileInfo
from tidegate.storage.files.file_system_store import FileSystemStore, open_store

_WILDCARDS = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True)
class FilePattern:
    """Files below `folder` whose path matches `expression`."""

    folder: str
    expression: str

    @staticmethod
    def of(url: str) -> FilePattern:
        """The pattern that a user has written. ConfigurationError if it names no folder."""
        scheme, separator, path = url.partition("://")
        if not separator:
            scheme, path = "", url
        if path.endswith("/") or not path:
            path += "*"
        at = _WILDCARDS.search(path)
        cut = path.rfind("/", 0, len(path) if at is None else at.start()) + 1
        folder, rest = path[:cut], path[cut:]
        if separator and not folder.strip("/"):
            raise ConfigurationError(
                f"from_files({url!r}): name a folder before the first wildcard, as in s3://bucket/*"
            )
        return FilePattern(open_store(f"{scheme}{separator}{folder or '.'}").url, _expression(rest))

    def store(self) -> FileSystemStore:
        """The folder."""
        return open_store(self.folder)

    def files(self) -> list[FileInfo]:
        """All files that match now, in the order of their paths. Raises StorageError."""
        matches = re.compile(self.expression).fullmatch
        return [file for file in self.store().walk("") if matches(file.path) and not _is_hidden(file.path)]


def _is_hidden(path: str) -> bool:
    return any(part.startswith(("_", ".")) for part in path.split("/"))


def _expression(pattern: str) -> str:
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]]+\])", pattern)
    return "".join(_AS_EXPRESSION.get(part) or (part if _is_choice(part) else re.escape(part)) for part in parts)


def _is_choice(part: str) -> bool:
    return len(part) > 2 and part[0] == "[" and part[-1] == "]"


_AS_EXPRESSION = {"**/": "(?:[^/]+/)*", "**": ".*", "*": "[^/]*", "?": "[^/]"}

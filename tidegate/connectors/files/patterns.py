"""`FilePattern`: which files of a folder count, and what each is called.

Rules:

- `*` and `?` stand for anything but a slash, `[ab]` for one of these characters and `[!ab]` for one of all others,
  `**/` for any number of folders. A pattern that ends with a slash means all files right in that folder.
- `[[]`, `[*]` and `[?]` stand for the characters themselves, as `glob.escape` writes them. A file that only matches
  where brackets stand for themselves is refused: which files are wanted is not known.
- A name that begins with `_` or `.` is hidden, as for Spark, and so is all below such a folder. So whoever writes a
  file under a hidden name and renames it shows it only when it is complete. A folder such as `_day=2024-01-01` has the
  value of a column that begins with `_`, and is not hidden.
- A folder that is a symbolic link is read like any other.
- A file is called by its path below the folder: the part of the pattern before the first wildcard. A path must be
  UTF-8: checkpoints store it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from tidegate.storage.errors import ConfigurationError
from tidegate.storage.files.file_system import FileInfo
from tidegate.storage.files.file_system_store import FileSystemStore, open_store

_WILDCARDS = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True)
class FilePattern:
    """Files below `folder` whose path matches `expression`."""

    folder: str
    expression: str

    below: tuple[str, ...] = ("",)
    """The parts of the folder in which they are."""

    literal: str = "(?!)"
    """An expression for the same pattern with brackets that stand for themselves."""

    @staticmethod
    def of(url: str | Sequence[str]) -> FilePattern:
        """The pattern that a user has written, or several. ConfigurationError if it names no folder."""
        if isinstance(url, str):
            return FilePattern._of_one(url)
        if not url:
            raise ConfigurationError("from_files([]): name at least one file")
        return FilePattern._together([FilePattern._of_one(each) for each in url])

    @staticmethod
    def _together(patterns: Sequence[FilePattern]) -> FilePattern:
        """One pattern for the files of all: below the folder that they share."""
        folders = [pattern.folder.rstrip("/").split("/") for pattern in patterns]
        pairs = zip(min(folders), max(folders), strict=False)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        root = "/".join(folders[0][:shared]) or "/"
        if len({"://" in pattern.folder for pattern in patterns}) > 1 or root.endswith((":/", ":")):
            urls = ", ".join(sorted({pattern.folder for pattern in patterns}))
            raise ConfigurationError(f"from_files: one list of files has one storage, not several: {urls}")
        below = ["/".join(folder[shared:]) for folder in folders]
        before = [re.escape(f"{part}/") if part else "" for part in below]
        expressions, literals = (
            "|".join(f"(?:{part}{each})" for part, each in zip(before, inner, strict=True))
            for inner in ([each.expression for each in patterns], [each.literal for each in patterns])
        )
        return FilePattern(open_store(root).url, expressions, tuple(dict.fromkeys(below)), literals)

    @staticmethod
    def _of_one(url: str) -> FilePattern:
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
        return FilePattern(
            open_store(f"{scheme}{separator}{folder or '.'}").url, _expression(url, rest), literal=_literal(rest)
        )

    def store(self) -> FileSystemStore:
        """The folder."""
        return open_store(self.folder)

    def files(self) -> list[FileInfo]:
        """All files that match now, in the order of their paths.

        Raises ConfigurationError for a file whose path is not UTF-8, or has the brackets of the pattern in its name,
        and StorageError.
        """
        matches, is_literal = re.compile(self.expression).fullmatch, re.compile(self.literal).fullmatch
        store = self.store()
        found: dict[str, FileInfo] = {}
        for part in self.below:
            for file in store.walk(part, follow_links=True):
                path = f"{part}/{file.path}" if part else file.path
                if _is_hidden(file.path):
                    continue
                if matches(path):
                    _check_name(path, self.folder)
                    found[path] = replace(file, path=path)
                elif is_literal(path):
                    raise ConfigurationError(
                        f"from_files: the name of {path!r} in {self.folder} has the brackets of the pattern, where "
                        "they stand for one of several characters; write [[] for a bracket, as glob.escape does"
                    )
        return [found[path] for path in sorted(found)]


def _check_name(path: str, folder: str) -> None:
    """Raise ConfigurationError for a name that no checkpoint can hold."""
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise ConfigurationError(
            f"from_files: the name of the file {os.fsencode(path)!r} in {folder} is not UTF-8; rename the file, or "
            "leave it out by the pattern"
        ) from error


def _is_hidden(path: str) -> bool:
    return any(part.startswith(".") or (part.startswith("_") and "=" not in part) for part in path.split("/"))


def _expression(url: str, pattern: str) -> str:
    parts = _PARTS.split(pattern)
    expression = "".join(_AS_EXPRESSION.get(part) or _choice(part) or re.escape(part) for part in parts)
    try:
        re.compile(expression)
    except re.error as error:
        raise ConfigurationError(f"from_files({url!r}): the brackets are no choice of characters: {error}") from error
    return expression


def _literal(pattern: str) -> str:
    if not any(map(_choice, _PARTS.split(pattern))):
        return "(?!)"
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", pattern)
    return "".join(_AS_EXPRESSION.get(part) or re.escape(part) for part in parts)


def _choice(part: str) -> str | None:
    """The expression for characters in brackets; None for anything else."""
    if len(part) < 3 or part[0] != "[" or part[-1] != "]":
        return None
    negated = part[1] in "!^" and len(part) > 3
    characters = re.sub(r"([\\\[&~|^])", r"\\\1", part[2:-1] if negated else part[1:-1])
    return f"(?!/)[{'^' if negated else ''}{characters}]"


_PARTS = re.compile(r"(\*\*/|\*\*|\*|\?|\[[^\]]+\])")
_AS_EXPRESSION = {"**/": "(?:[^/]+/)*", "**": ".*", "*": "[^/]*", "?": "[^/]"}

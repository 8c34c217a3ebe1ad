"""`FilePattern`: selects files by a pattern, and parses partition columns from the names of folders.

Rules:

- `*` and `?` match anything but a slash, `[ab]` one of these characters, `[!ab]` any other character, and `**/` any
  number of folders. A pattern that ends with a slash matches all files directly in that folder, and so does a path
  without wildcards that names a folder (`folders_named`).
- `[[]`, `[*]` and `[?]` match the characters themselves, as `glob.escape` writes them. A file that matches only if
  brackets are taken literally is refused, because the pattern is ambiguous.
- A name that begins with `_` or `.` is hidden, as in Spark, and so is everything below such a folder. So a writer can
  use a hidden name and rename the file when it is complete. A folder such as `_day=2024-01-01` is not hidden: it has
  the value of a column that begins with `_`.
- Symbolic links to folders are followed.
- A file is named by its path below the folder, which is the part of the pattern before the first wildcard. The path
  must be UTF-8, because checkpoints store it.
- Columns in names of folders are written as Hive and Spark do: `day=2013-01-01/shop=a%2Fb/x`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from urllib.parse import unquote

import pyarrow as pa

from tidegate.connectors.formats.text import DEFAULTS, converter_of
from tidegate.storage.errors import ConfigurationError, NotFoundError
from tidegate.storage.files.file_system import FileInfo
from tidegate.storage.files.file_system_store import FileSystemStore, open_store
from tidegate.storage.tables.partitions import HIVE_NULL

_WILDCARDS = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True)
class FilePattern:
    """Matches files: all files below `folder` whose relative path matches the regular expression `expression`."""

    folder: str
    expression: str

    below: tuple[str, ...] = ("",)
    """Subfolders of `folder` that are listed, as relative paths."""

    literal: str = "(?!)"
    """A second regular expression in which brackets are literal. It detects ambiguous patterns."""

    @staticmethod
    def of(url: str | Sequence[str]) -> FilePattern:
        """Parses the pattern or patterns that a user has written.

        Raises ConfigurationError if a pattern names no folder.
        """
        if isinstance(url, str):
            return FilePattern._of_one(url)
        if not url:
            raise ConfigurationError("from_files([]): the list of files is empty; name at least one file")
        return FilePattern._together([FilePattern._of_one(each) for each in url])

    @staticmethod
    def _together(patterns: Sequence[FilePattern]) -> FilePattern:
        """Returns one pattern that matches the files of all patterns, below their common folder."""
        folders = [pattern.folder.rstrip("/").split("/") for pattern in patterns]
        pairs = zip(min(folders), max(folders), strict=False)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        root = "/".join(folders[0][:shared]) or "/"
        if len({"://" in pattern.folder for pattern in patterns}) > 1 or root.endswith((":/", ":")):
            urls = ", ".join(sorted({pattern.folder for pattern in patterns}))
            raise ConfigurationError(
                f"from_files: one list of files has one storage, not several: {urls}; call from_files for each"
            )
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
            scheme = ""
            path = url
        if path.endswith("/") or not path:
            path += "*"
        at = _WILDCARDS.search(path)
        cut = path.rfind("/", 0, len(path) if at is None else at.start()) + 1
        folder = path[:cut]
        rest = path[cut:]
        if separator and not folder.strip("/"):
            raise ConfigurationError(
                f"from_files({url!r}): name a folder before the first wildcard, as in s3://bucket/*"
            )
        return FilePattern(
            open_store(f"{scheme}{separator}{folder or '.'}").url, _expression(url, rest), literal=_literal(rest)
        )

    def store(self) -> FileSystemStore:
        """Opens the store at the folder of the pattern."""
        return open_store(self.folder)

    def files(self) -> list[FileInfo]:
        """Returns all files that match now, in the order of their paths.

        Raises ConfigurationError for a file whose path is not UTF-8, or has the brackets of the pattern in its name,
        and StorageError.
        """
        matches = re.compile(self.expression).fullmatch
        is_literal = re.compile(self.literal).fullmatch
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
                        "they mean one of several characters; write [[] for a bracket, as glob.escape does"
                    )
        return [found[path] for path in sorted(found)]


def folders_named(url: str | Sequence[str], *, deep: bool, growing: bool) -> str | list[str]:
    """Returns the pattern or patterns of a user, where each path of a folder has become the pattern of its files.

    - `deep`: whether files at any depth are meant, as with columns in the names of folders.
    - `growing`: whether a path that names nothing yet is a folder too.

    Raises StorageError if the storage does not answer.
    """
    if isinstance(url, str):
        return _files_in(url, deep, growing)
    return [_files_in(each, deep, growing) for each in url]


def _files_in(url: str, deep: bool, growing: bool) -> str:
    if not url or url.endswith("/") or _WILDCARDS.search(url.partition("://")[2] or url):
        return url
    above, _, name = url.rpartition("/")
    if not name or above.endswith(":/"):
        return url  # The root of a bucket, which FilePattern refuses.
    has_files = any(not _is_hidden(file.path) for file in open_store(url).walk("", follow_links=True))
    if not has_files and not (growing and _is_missing(above, name)):
        return url
    return f"{url}/**/*" if deep else f"{url}/"


def _is_missing(above: str, name: str) -> bool:
    try:
        open_store(above or ".").info(name)
    except NotFoundError:
        return True
    return False


def _check_name(path: str, folder: str) -> None:
    """Raises ConfigurationError for a path that is not UTF-8, because a checkpoint cannot store it."""
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise ConfigurationError(
            f"from_files: the name of the file {os.fsencode(path)!r} in {folder} is not UTF-8; rename the file, or "
            "exclude it by the pattern"
        ) from error


def _is_hidden(path: str) -> bool:
    return any(part.startswith(".") or (part.startswith("_") and "=" not in part) for part in path.split("/"))


def _expression(url: str, pattern: str) -> str:
    parts = _PARTS.split(pattern)
    expression = "".join(_AS_EXPRESSION.get(part) or _choice(part) or re.escape(part) for part in parts)
    try:
        re.compile(expression)
    except re.error as error:
        raise ConfigurationError(
            f"from_files({url!r}): the brackets are not a set of characters: {error}"
            "; correct them, or write [[] for a bracket"
        ) from error
    return expression


def _literal(pattern: str) -> str:
    if not any(map(_choice, _PARTS.split(pattern))):
        return "(?!)"
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", pattern)
    return "".join(_AS_EXPRESSION.get(part) or re.escape(part) for part in parts)


def _choice(part: str) -> str | None:
    """Returns the regular expression for a set of characters in brackets, such as `[abc]`. None for any other text."""
    if len(part) < 3 or part[0] != "[" or part[-1] != "]":
        return None
    negated = part[1] in "!^" and len(part) > 3
    characters = re.sub(r"([\\\[&~|^])", r"\\\1", part[2:-1] if negated else part[1:-1])
    return f"(?!/)[{'^' if negated else ''}{characters}]"


_PARTS = re.compile(r"(\*\*/|\*\*|\*|\?|\[[^\]]+\])")
_AS_EXPRESSION = {"**/": "(?:[^/]+/)*", "**": ".*", "*": "[^/]*", "?": "[^/]"}


_FLOAT_WORDS = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
"""Special values of floats as Python and Arrow write them in folder names, and as Spark writes them."""


def folder_values(path: str, partitions: pa.Schema) -> pa.RecordBatch:
    """Parses the partition columns in a path, and returns them as one row. Values are parsed as in CSV.

    Raises ConfigurationError if a folder is missing, occurs twice, or has a value of another type.
    """
    parts = [folder.partition("=") for folder in path.split("/")[:-1]]
    names = [unquote(name) for name, separator, _ in parts if separator]
    texts = {unquote(name): value for name, separator, value in parts if separator}
    columns = []
    for field in partitions:
        if field.name not in texts:
            raise ConfigurationError(
                f"{path} is in no folder {field.name}=..., but partitions= names only folders of every file; remove "
                f"{field.name!r} from partitions=, or move the file"
            )
        if names.count(field.name) > 1:
            raise ConfigurationError(
                f"{path} is in two folders {field.name}=...; which value counts is not known"
                f"; move the file, or remove {field.name!r} from partitions="
            )
        columns.append(_value(path, field, texts[field.name]))
    return pa.RecordBatch.from_arrays(columns, schema=partitions)


def _value(path: str, field: pa.Field, encoded: str) -> pa.Array:
    if encoded == HIVE_NULL:
        if not field.nullable:
            raise ConfigurationError(
                f"{path}: {field.name} is null there, and partitions= has it as not nullable"
                "; make it nullable in partitions=, or move the file"
            )
        return pa.nulls(1, field.type)
    try:
        text = unquote(encoded, errors="strict")
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path}: {field.name}={encoded} is not UTF-8; rename the folder") from error
    if pa.types.is_floating(field.type):
        text = _FLOAT_WORDS.get(text, text)
    convert = converter_of(field, DEFAULTS)
    values = pa.array([text], pa.string())
    try:
        return values if convert is None else convert(values)
    except (ValueError, OverflowError) as error:
        raise ConfigurationError(
            f"{path}: {field.name}={text} is not of type {field.type}: {error}"
            "; give another type in partitions=, or move the file"
        ) from error

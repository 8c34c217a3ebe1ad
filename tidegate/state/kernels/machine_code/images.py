"""Images of kernels on disk: content, name and place of their files.

A file is a header and the object file that LLVM has made. Its name includes all that the machine code depends on, so a
file is never wrong: name and program of the kernel, the modules of this folder, the types of the arguments, the
processor, and the versions and settings of Python, NumPy, numba and LLVM.

Rules: a file appears whole or not at all, and never changes. A file with a wrong checksum counts as missing. A few
files that are no longer used are kept; older ones are deleted when a new file is written.
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
import sys
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import llvmlite.binding as llvm

log = logging.getLogger(__name__)

_MAGIC = b"tidegate kernel 1"
_HEAD = struct.Struct("<17sI")
_BODY = struct.Struct("<I16s")
"""Length of the code, and its result type."""
_OLD_FILES_MAX = 8
"""Files kept per kernel and argument types: other processors and versions may share the folder."""


@dataclass(frozen=True, slots=True)
class Image:
    """The compiled machine code of a kernel for certain argument types, as an object file, with its result type."""

    code: bytes
    result: str
    """Name of a numba type, or "" if nothing is returned."""


def encode(image: Image) -> bytes:
    """Returns the content of the file that stores an image."""
    checked = _BODY.pack(len(image.code), image.result.encode()) + image.code
    return _HEAD.pack(_MAGIC, zlib.crc32(checked)) + checked


def decode(content: bytes) -> Image | None:
    """Returns the image of a file, or None if the file is damaged."""
    start = _HEAD.size + _BODY.size
    if len(content) < start or _HEAD.unpack_from(content) != (_MAGIC, zlib.crc32(content[_HEAD.size :])):
        return None
    size, result = _BODY.unpack_from(content, _HEAD.size)
    return Image(content[start:], result.rstrip(b"\0").decode()) if len(content) == start + size else None


def kept(path: Path) -> Image | None:
    """Reads an image from its file. Returns None if the file is missing or damaged."""
    try:
        return decode(path.read_bytes())
    except OSError:
        return None


def keep(path: Path, image: Image) -> None:
    """Writes the file of an image atomically. If that fails, the next process compiles the kernel again.

    The file is readable for every user who may import the modules next to it.
    """
    unfinished = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        unfinished.write_bytes(encode(image))
        os.replace(unfinished, path)
    except OSError as error:
        log.debug("machine code was not stored: %s", error)
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        return
    of_kernel = path.parent.glob(path.name.rpartition("-")[0] + "-*.kernel")
    for old in sorted(of_kernel, key=_written_s, reverse=True)[_OLD_FILES_MAX:]:
        old.unlink(missing_ok=True)


def _written_s(path: Path) -> float:
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def file_name(kernel: str, program: bytes, kinds: Iterable[str]) -> str:
    """Returns the file name of the image of a kernel (`module.function`) for this program and argument types."""
    arguments = hashlib.blake2b(",".join(kinds).encode(), digest_size=8).hexdigest()
    depends = hashlib.blake2b(_surroundings() + program, digest_size=12).hexdigest()
    return f"{kernel}-{arguments}-{depends}.kernel"


def folders(source: Path) -> Iterator[Path]:
    """Yields the folders where images of a module's kernels may be stored, as numba would, the best one first."""
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    if chosen:
        # Modules with the same name in two installations do not collide: file names include their content.
        yield Path(chosen)
        return
    yield source.parent / "__pycache__"
    cache_home = os.environ.get("XDG_CACHE_HOME")
    with suppress(RuntimeError):  # A user without a home.
        yield (Path(cache_home) if cache_home else Path.home() / ".cache") / "tidegate" / "kernels"


def _sources() -> bytes:
    """Returns the source code of the modules in this folder.

    Reads it at import, so that it is the code that runs.
    """
    return b"\0".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))


_COMPILERS = hashlib.blake2b(_sources(), digest_size=16).digest()


@cache
def processor() -> str:
    """Returns the processor's name and features as LLVM detects them. Kernels are compiled for exactly this
    processor.
    """
    return f"{llvm.get_process_triple()} {llvm.get_host_cpu_name()} {llvm.get_host_cpu_features().flatten()}"


@cache
def _surroundings() -> bytes:
    """Returns a digest of everything on which all machine code of this process depends, such as processor and library
    versions.
    """
    found = hashlib.blake2b(digest_size=16)
    for part in (sys.version, processor(), *_settings(), *_versions()):
        found.update(part.encode() + b"\0")
    found.update(_COMPILERS)
    return found.digest()


def _settings() -> list[str]:
    """Returns numba's settings. Some of them change the compiled code."""
    return sorted(
        f"{name}={value}"
        for name, value in os.environ.items()
        if name.startswith("NUMBA_") and name != "NUMBA_CACHE_DIR"
    )


def _versions() -> Iterator[str]:
    """Yields the versions of the libraries on which compiled code depends, without importing the compilers."""
    for library in ("numpy", "numba", "llvmlite"):
        found = find_spec(library)
        assert found is not None, f"{library} is not installed"
        assert found.origin is not None
        folder = Path(found.origin).parent
        yield "".join(path.read_text() for path in (folder / "_version.py", folder / "version.py") if path.exists())

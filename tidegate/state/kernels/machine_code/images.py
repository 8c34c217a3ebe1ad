"""Images of kernels on disk: what a file says, what it is called, and where it lies.

A file is a head and the object file that LLVM has made. Its name says all that the machine code depends on, so that no
file is ever wrong: the kernel's name and program, the modules here, the kinds of its arguments, the processor, the
versions and settings of Python, NumPy, numba and LLVM.

Rules: a file appears whole or not at all, and is never changed. One whose checksum is wrong counts as missing. Of files
that nobody asks for any more a few are left, and the others deleted when a successor is written.
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

from tidegate.state.kernels.machine_code.loading import processor

log = logging.getLogger(__name__)

_MAGIC = b"tidegate kernel 1"
_HEAD = struct.Struct("<17sI")
_BODY = struct.Struct("<I16s")
"""How long the code is, and what it returns."""
_OLD_FILES_MAX = 8
"""So many files of one kernel for the same arguments are kept: other processors and versions may share the folder."""


@dataclass(frozen=True, slots=True)
class Image:
    """Machine code of a kernel for certain arguments, as an object file, and what it returns."""

    code: bytes
    result: str
    """A type of numba's, or nothing."""


def encode(image: Image) -> bytes:
    """What a file holds."""
    checked = _BODY.pack(len(image.code), image.result.encode()) + image.code
    return _HEAD.pack(_MAGIC, zlib.crc32(checked)) + checked


def decode(content: bytes) -> Image | None:
    """The image in a file, or None if it is torn."""
    start = _HEAD.size + _BODY.size
    if len(content) < start or _HEAD.unpack_from(content) != (_MAGIC, zlib.crc32(content[_HEAD.size :])):
        return None
    size, result = _BODY.unpack_from(content, _HEAD.size)
    return Image(content[start:], result.rstrip(b"\0").decode()) if len(content) == start + size else None


def kept(path: Path) -> Image | None:
    """The image of a file, or None if it is missing or torn."""
    try:
        return decode(path.read_bytes())
    except OSError:
        return None


def keep(path: Path, image: Image) -> None:
    """Write the file of an image, whole or not at all: where there is no room the next process compiles again.

    Whoever may use the modules beside it may read it.
    """
    unfinished = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        unfinished.write_bytes(encode(image))
        os.replace(unfinished, path)
    except OSError as error:
        log.debug("machine code is not kept: %s", error)
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
    """Of the image of a kernel, `module.function`, with this program, for arguments of some kinds."""
    arguments = hashlib.blake2b(",".join(kinds).encode(), digest_size=8).hexdigest()
    depends = hashlib.blake2b(_surroundings() + program, digest_size=12).hexdigest()
    return f"{kernel}-{arguments}-{depends}.kernel"


def folders(source: Path) -> Iterator[Path]:
    """Where images of a module's kernels may lie, the best place first: where numba would keep them."""
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    if chosen:
        # Modules of one name in two installations do not meet: what they hold is in the names of files.
        yield Path(chosen)
        return
    yield source.parent / "__pycache__"
    cache_home = os.environ.get("XDG_CACHE_HOME")
    with suppress(RuntimeError):  # A user without a home.
        yield (Path(cache_home) if cache_home else Path.home() / ".cache") / "tidegate" / "kernels"


def _sources() -> bytes:
    """The modules that compile and call; read when they are imported, so that it is these."""
    here = Path(__file__).parent
    return b"\0".join(path.read_bytes() for path in (here.with_name("page_size.py"), *sorted(here.glob("*.py"))))


_COMPILERS = hashlib.blake2b(_sources(), digest_size=16).digest()


@cache
def _surroundings() -> bytes:
    """What all machine code of this process depends on."""
    found = hashlib.blake2b(digest_size=16)
    for part in (sys.version, processor(), *_settings(), *_versions()):
        found.update(part.encode() + b"\0")
    found.update(_COMPILERS)
    return found.digest()


def _settings() -> list[str]:
    """What is set for numba: some of it changes the code."""
    return sorted(
        f"{name}={value}"
        for name, value in os.environ.items()
        if name.startswith("NUMBA_") and name != "NUMBA_CACHE_DIR"
    )


def _versions() -> Iterator[str]:
    """The versions of the libraries, without importing the compilers."""
    for library in ("numpy", "numba", "llvmlite"):
        found = find_spec(library)
        assert found is not None, f"{library} is not installed"
        assert found.origin is not None
        folder = Path(found.origin).parent
        yield "".join(path.read_text() for path in (folder / "_version.py", folder / "version.py") if path.exists())

"""Links an object file into an image: bytes that run wherever they are put.

`compiling.py` calls it with what LLVM emits for one kernel. All that an image refers to lies in it, and is found
relative to the instruction that wants it. So it is linked once, and a process that loads it only has to map it.

Rules: an object that needs more than that (a function of a library, memory to write to, an address that is fixed) is
refused, never half linked. Only ELF for x86-64 is understood; the layouts are those of the System V ABI and of its
supplement for AMD64.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

ALIGNMENT_BYTES = 64
"""An image must be put at a multiple of this."""

_FILE = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELOCATION = struct.Struct("<QQq")

_MAGIC = b"\x7fELF\x02\x01"
"""64 bits, little-endian."""
_X86_64 = 62
_PROGRAM, _SYMBOLS, _RELOCATIONS = 1, 2, 4
_WRITABLE, _LOADED = 1, 2
_RELATIVE = {2: 4, 4: 4, 24: 8}
"""Kinds of relocations that say how far something is (PC32, PLT32, PC64), with the bytes that the distance has."""


class CannotLink(Exception):
    """The object needs what an image cannot have."""


class _Section(NamedTuple):
    name: int
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int
    entry_size: int


class _Symbol(NamedTuple):
    name: str
    section: int
    value: int


def link(object_file: bytes, entry: str) -> tuple[bytes, int]:
    """The image of an object file, and where in it the function `entry` begins."""
    sections = _sections(object_file)
    places, image = _lay_out(object_file, sections)
    symbols = [
        symbol
        for section in sections
        if section.kind == _SYMBOLS
        for symbol in _symbols(object_file, section, sections)
    ]
    for section in sections:
        if section.kind == _RELOCATIONS and section.info in places:
            for offset, info, addend in _RELOCATION.iter_unpack(_bytes(object_file, section)):
                symbol = symbols[info >> 32]
                _relocate(image, places[section.info] + offset, info & 0xFFFFFFFF, _place(symbol, places) + addend)
    for symbol in symbols:
        if symbol.name == entry:
            return bytes(image), _place(symbol, places)
    raise CannotLink(f"the object has no {entry!r}")


def _sections(object_file: bytes) -> list[_Section]:
    if len(object_file) < _FILE.size:
        raise CannotLink("no object file")
    magic, _, machine, *rest = _FILE.unpack_from(object_file)
    if not magic.startswith(_MAGIC) or machine != _X86_64:
        raise CannotLink("the object is not for x86-64, or not ELF")
    start, count = rest[3], rest[9]
    return [_Section(*_SECTION.unpack_from(object_file, start + number * _SECTION.size)) for number in range(count)]


def _bytes(object_file: bytes, section: _Section) -> bytes:
    return object_file[section.offset : section.offset + section.size]


def _symbols(object_file: bytes, section: _Section, sections: list[_Section]) -> Iterator[_Symbol]:
    names = _bytes(object_file, sections[section.link])
    for name, _, _, index, value, _ in _SYMBOL.iter_unpack(_bytes(object_file, section)):
        yield _Symbol(names[name : names.index(b"\0", name)].decode(), index, value)


def _lay_out(object_file: bytes, sections: list[_Section]) -> tuple[dict[int, int], bytearray]:
    """Code and constants one behind the other; where each section begins."""
    places: dict[int, int] = {}
    image = bytearray()
    for number, section in enumerate(sections):
        if section.kind == _PROGRAM and section.flags & _LOADED and not section.flags & _WRITABLE:
            if section.alignment > ALIGNMENT_BYTES:
                raise CannotLink(f"a section wants to lie at a multiple of {section.alignment} bytes")
            image += bytes(-len(image) % max(section.alignment, 1))
            places[number] = len(image)
            image += _bytes(object_file, section)
    return places, image


def _place(symbol: _Symbol, places: dict[int, int]) -> int:
    if symbol.section not in places:
        raise CannotLink(f"{symbol.name or 'a section'!r} is not code or a constant of the object")
    return places[symbol.section] + symbol.value


def _relocate(image: bytearray, where: int, kind: int, target: int) -> None:
    if kind not in _RELATIVE:
        raise CannotLink(f"relocation {kind} is not relative")
    size = _RELATIVE[kind]
    image[where : where + size] = (target - where).to_bytes(size, "little", signed=True)

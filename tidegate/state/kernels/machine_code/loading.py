"""Puts the object file of a kernel into this process, and says where its function is. LLVM's linker does it.

`compiling.py` tries it with what it has made; `calling.py` asks for what was kept. `llvmlite.binding` is LLVM without
numba: to import it costs a small part of what the compiler does.

Rules:

- An object finds nothing outside itself: neither functions of libraries, nor numba's. One that needs any cannot be
  loaded, here or in another process.
- What is loaded stays for as long as the process lives: functions point into it.
"""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import llvmlite.binding as llvm

ENTRY = "tidegate_kernel"
"""The function that each object has."""

_numbers = itertools.count()
_loaded: list[Any] = []


class CannotLoadError(Exception):
    """There is no machine code that runs by itself."""


def address_of(code: bytes) -> int:
    """Where the function of this object file is. CannotLoadError. One thread at a time."""
    built = llvm.JITLibraryBuilder().add_object_img(code).export_symbol(ENTRY)
    try:
        library = built.link(_linker(), f"kernel {next(_numbers)}")
    except RuntimeError as error:
        raise CannotLoadError(str(error)) from error
    _loaded.append(library)
    address: int = library[ENTRY]
    return address


@cache
def processor() -> str:
    """Its name and what it can do, as LLVM knows it, which makes code for just that."""
    return f"{llvm.get_process_triple()} {llvm.get_host_cpu_name()} {llvm.get_host_cpu_features().flatten()}"


@cache
def _linker() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.create_lljit_compiler(use_jit_link=True, suppress_errors=True)

"""What code of users may raise, and nobody expects. Modules of tests that send it elsewhere send this one along."""

from __future__ import annotations

import threading
from collections.abc import Callable

import polars as pl


class Unreadable(Exception):
    """An error that can neither be read nor pickled."""

    def __init__(self) -> None:
        super().__init__(threading.Lock())

    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__


RAISED: dict[str, Callable[[], BaseException]] = {
    "SystemExit": lambda: SystemExit(0),
    "KeyboardInterrupt": KeyboardInterrupt,
    "GeneratorExit": GeneratorExit,
    "PanicException": lambda: pl.exceptions.PanicException("panic"),
    "MemoryError": MemoryError,
    "Unreadable": Unreadable,
    "UnicodeError": lambda: UnicodeError("\udcff"),
    "ArithmeticError": lambda: ArithmeticError("x" * 3_000_000),
}
"""By their names: exits, a panic of a library, and errors that cannot be read, encoded or kept as they are."""

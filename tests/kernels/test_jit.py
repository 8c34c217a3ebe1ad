"""Kernels: compiled once, kept on disk, found by other processes, and the same as numba's."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tidegate.state.kernels import accumulate, choose, hashing, partition
from tidegate.state.kernels.jit import Kernel
from tidegate.state.kernels.machine_code import compiling, images
from tidegate.state.kernels.machine_code.page_size import PAGE_ROWS
from tidegate.state.key_index import bytes_index

GENERAL = Kernel.general
SOURCE = """
import numpy as np
from tidegate.state.kernels.jit import kernel

@kernel
def inner(x):
    return x + {added}

@kernel
def outer(values, flag):
    total = 0
    for i in range(values.shape[0]):
        total += inner(values[i])
    return total if flag else -total

@kernel
def allocates(n):
    return np.ones(n).sum()
"""
VALUES = np.arange(4, dtype=np.int64)


def kernels(folder: Path, added: int = 1) -> Any:
    """A module of kernels, as another process would have it."""
    path = folder / "kernels.py"
    path.write_text(SOURCE.format(added=added))
    # Not by an import: Python takes its own bytecode for that of a file that has changed within a second.
    module = ModuleType("kernels")
    exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
    return module


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that are compiled from now on."""
    names: list[str] = []
    original = compiling.make_image

    def watched(function: Callable[..., Any], *rest: Any) -> Any:
        names.append(function.__name__)
        return original(function, *rest)

    monkeypatch.setattr(compiling, "make_image", watched)
    return names


@pytest.mark.slow
def test_code_that_was_kept_is_not_compiled_again(tmp_path: Path, compiled: list[str]) -> None:
    """The one who comes second finds it; with other types, or from another source, it is other code."""
    assert kernels(tmp_path).outer(VALUES, True) == 10
    assert compiled == ["outer"]
    assert kernels(tmp_path).outer(VALUES, False) == -10
    assert compiled == ["outer"]
    assert kernels(tmp_path).outer(VALUES.astype(np.int32), True) == 10
    assert kernels(tmp_path, added=2).outer(VALUES, True) == 14
    assert compiled == ["outer"] * 3


@pytest.mark.slow
def test_a_source_that_changes_after_its_import_is_no_matter(tmp_path: Path) -> None:
    """A process runs what it has imported, and keeps nothing of that under the name of what lies there now."""
    before = kernels(tmp_path)
    after = kernels(tmp_path, added=2)
    assert before.outer(VALUES, True) == 10
    assert after.outer(VALUES, True) == 14
    assert kernels(tmp_path, added=2).outer(VALUES, True) == 14


@pytest.mark.slow
def test_code_that_cannot_be_kept_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full costs the next process a compilation, nothing else. Nothing unfinished stays."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(os, "replace", full)
    assert kernels(tmp_path).outer(VALUES, True) == 10
    assert [path.name for path in (tmp_path / "__pycache__").iterdir()] == [".kernels.outer.lock"]


@pytest.mark.slow
def test_a_torn_file_counts_as_missing(tmp_path: Path, compiled: list[str]) -> None:
    """It is written anew."""
    kernels(tmp_path).outer(VALUES, True)
    (file,) = (tmp_path / "__pycache__").glob("*.kernel")
    whole = file.read_bytes()
    for torn in (b"", whole[:-1], whole + b"x", whole[:-1] + bytes([whole[-1] ^ 1])):
        file.write_bytes(torn)
        assert kernels(tmp_path).outer(VALUES, True) == 10
        assert images.decode(file.read_bytes()) is not None
    assert compiled == ["outer"] * 5


def test_code_lies_in_the_users_cache_where_modules_are_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[str]
) -> None:
    """Nor is it compiled twice then."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    installed = tmp_path / "installed"
    installed.mkdir()
    (installed / "__pycache__").write_text("no folder: nobody can write into it")
    for _ in range(2):
        assert kernels(installed).outer(VALUES, True) == 10
    assert compiled == ["outer"]
    assert list((tmp_path / "cache" / "tidegate" / "kernels").glob("*.kernel"))


def test_one_process_at_a_time_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait, and take what it has kept."""
    locked: list[bool] = []
    original = compiling.make_image

    def watched(*arguments: Any) -> Any:
        (lock,) = (tmp_path / "__pycache__").glob(".kernels.outer.lock")
        with lock.open("ab") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        locked.append(True)
        made = original(*arguments)
        # Another process was quicker, and this one has waited for it.
        monkeypatch.setattr(compiling, "make_image", None)
        return made

    monkeypatch.setattr(compiling, "make_image", watched)
    assert kernels(tmp_path).outer(VALUES, True) == 10
    assert kernels(tmp_path).outer(VALUES, True) == 10
    assert locked == [True]


@pytest.mark.slow
def test_what_an_image_cannot_do_numba_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays in steps, and kernels that make arrays: right, if not quick. Arrays at odd addresses are no such thing."""
    used: list[str] = []

    def general(self: Kernel, *arguments: Any) -> Any:
        used.append(self.__name__)
        return GENERAL(self, *arguments)

    monkeypatch.setattr(Kernel, "general", general)
    module = kernels(tmp_path)
    assert module.outer(VALUES, True) == 10
    assert module.outer(VALUES[3:], True) == 4
    assert module.outer(np.frombuffer(b"\0" + VALUES.tobytes(), dtype=np.int64, offset=1), True) == 10
    assert not used
    assert module.outer(VALUES[::2], True) == 4
    assert module.outer(VALUES[::-1], True) == 10
    assert module.allocates(3) == 3.0
    assert used == ["outer", "outer", "allocates"]


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    """Of each type that kernels are called with."""
    inner = kernels(tmp_path).inner
    assert [inner(np.int64(-3)), inner(np.uint64(7)), inner(np.int32(4)), inner(1.5), inner(np.float64(0.5))] == [
        -2,
        8,
        5,
        2.5,
        1.5,
    ]


ROWS = st.integers(0, 40)


@st.composite
def calls(draw: st.DrawFn) -> tuple[Any, list[Any]]:
    """A kernel with arguments that it may get."""
    rows = draw(ROWS)

    def column(dtype: Any, values: st.SearchStrategy[Any] | None = None, length: int = rows) -> Any:
        return draw(arrays(dtype, length, elements=values))

    page = np.zeros(PAGE_ROWS, dtype=np.float64)
    pages = np.array([page.ctypes.data], dtype=np.uintp)
    slots, mask = column(np.int32, st.integers(0, 5)), column(np.uint8, st.integers(0, 1))
    floats = column(np.float64)
    offsets = np.cumsum(np.append(0, column(np.int64, st.integers(0, 40))))
    data = column(np.uint8, st.integers(0, 2), int(offsets[-1]) + 8)
    table = np.zeros(256, dtype=np.int64)
    found = [np.zeros(rows, dtype=np.int32) for _ in range(3)]
    counters = np.zeros(4, dtype=np.int64)
    met, null = np.zeros(4, dtype=np.uint64), np.zeros(2, dtype=np.int64)
    known: tuple[Any, ...] = (table, null, met)
    return draw(
        st.sampled_from(
            [
                (accumulate._sum_int64, [pages, slots, column(np.int64), mask, np.zeros(rows, np.int64)]),
                (
                    choose.choose_extreme,
                    [
                        pages,
                        pages,
                        slots,
                        floats,
                        mask,
                        np.zeros(rows, np.uint8),
                        *draw(st.tuples(*2 * [st.booleans()])),
                    ],
                ),
                (hashing._hash_strings, [offsets, data, mask, column(np.uint64)]),
                (
                    partition._partition,
                    [
                        column(np.uint64),
                        column(np.uint16, st.integers(0, 2), 12),
                        np.zeros(rows, dtype=np.uint16),
                        np.zeros(3, dtype=np.int64),
                        found[0],
                        np.zeros(4, dtype=np.int64),
                    ],
                ),
                (
                    bytes_index._upsert,
                    [
                        *known,
                        np.zeros(2000, dtype=np.uint8),
                        np.zeros(1, dtype=np.int64),
                        column(np.uint64, st.integers(0, 3)),
                        offsets,
                        data,
                        mask,
                        *found,
                        counters,
                    ],
                ),
            ]
        )
    ), [page]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(calls())
def test_images_do_what_numba_does(case: tuple[tuple[Any, list[Any]], list[Any]]) -> None:
    """To the bit: in what they return, and in each array that they are given."""
    (kernel, arguments), [page] = case
    before = [each.copy() if isinstance(each, np.ndarray) else each for each in (page, *arguments)]
    outcomes = []
    for run in (kernel, kernel.for_numba("general")):
        for array, value in zip((page, *arguments), before, strict=True):
            if isinstance(array, np.ndarray):
                array[:] = value
        result = run(*arguments)
        outcomes.append(
            [repr(result), *(each.tobytes() for each in (page, *arguments) if isinstance(each, np.ndarray))]
        )
    assert outcomes[0] == outcomes[1]

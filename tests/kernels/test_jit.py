"""The cache of machine code beside the kernels, which several processes come to at the same time."""

from __future__ import annotations

import fcntl
import importlib.util
from pathlib import Path
from typing import Any

import pytest
from numba.core.caching import IndexDataCacheFile
from numba.core.dispatcher import _FunctionCompiler

SOURCE = """
from tidegate.actors.kernels.jit import kernel

@kernel
def inner(x):
    return x + 1

@kernel
def outer(x):
    return inner(x) + 1
"""


def kernels(folder: Path) -> Any:
    """A module of two kernels, one of which calls the other, as another process would have it."""
    path = folder / "kernels.py"
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("kernels", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("part", "step"),
    [
        (IndexDataCacheFile, "_load_index"),
        (_FunctionCompiler, "compile"),
        (IndexDataCacheFile, "_save_index"),
        (IndexDataCacheFile, "_save_data"),
    ],
)
def test_nobody_else_is_at_a_kernel_while_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: type, step: str
) -> None:
    """From the look for its code to the end of keeping it, for a kernel and for those that it calls."""
    held: list[set[str]] = []
    original = getattr(part, step)

    def watched(*arguments: object) -> object:
        held.append({name for name in ("inner", "outer") if is_held(getattr(module, name))})
        return original(*arguments)

    module = kernels(tmp_path)
    monkeypatch.setattr(part, step, watched)
    assert module.outer(1) == 3
    assert len(held) >= 2
    assert all("outer" in names for names in held)
    assert {"inner", "outer"} in held


def test_code_that_was_kept_is_not_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one who comes second finds it."""
    assert kernels(tmp_path).outer(1) == 3
    monkeypatch.setattr(_FunctionCompiler, "compile", None)
    assert kernels(tmp_path).outer(1) == 3


def is_held(kernel: Any) -> bool:
    """Whether somebody holds its lock."""
    with open(f"{kernel._cache._cache_file._index_path}.lock", "ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False

"""The cache of machine code beside the kernels, which several processes come to at the same time."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest
from numba.core.caching import IndexDataCacheFile

from tidegate.actors.kernels import hashing
from tidegate.actors.kernels.jit import one_at_a_time


@pytest.mark.parametrize("step", ["_load_index", "_save_index", "_save_data", "_load_data"])
def test_nobody_else_is_at_the_cache_while_one_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """Between the index and the data that it names, on the way in and out, there is one lock."""
    files = IndexDataCacheFile(str(tmp_path / "cache"), "kernel", "stamp")
    one_at_a_time(files)
    held: list[bool] = []
    original = getattr(files, step)

    def watched(*arguments: object) -> object:
        with (tmp_path / "cache" / "kernel.nbi.lock").open("ab") as other:
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held.append(False)
            except BlockingIOError:
                held.append(True)
        return original(*arguments)

    monkeypatch.setattr(files, step, watched)
    files.save("types", b"code")
    assert files.load("types") == b"code"
    assert set(held) == {True}


def test_kernels_have_such_a_cache() -> None:
    """What the decorator makes is locked."""
    files = hashing._rotate._cache._cache_file  # type: ignore[attr-defined]
    files.load("nothing")
    assert Path(f"{files._index_path}.lock").exists()

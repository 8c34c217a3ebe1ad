"""Deleting a folder while somebody else deletes it as well."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tidegate.storage.files.file_system_store import open_store


def test_two_may_delete_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that vanishes under the deletion does not keep the others: in the end nothing is left."""
    store = open_store(str(tmp_path))
    for name in "abcd":
        store.write(f"folder/inner/{name}", [b"x"])
    unlink = os.unlink
    others = ["a", "b"]

    def unlink_after_somebody(path: str, *, dir_fd: int | None = None) -> None:
        if others:
            unlink(tmp_path / "folder" / "inner" / others.pop())
        unlink(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", unlink_after_somebody)
    store.delete_tree("folder")

    assert store.list("") == []

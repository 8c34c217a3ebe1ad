"""What users choose of RocksDB itself reaches the database."""

from __future__ import annotations

from pathlib import Path

from tidegate.state.common.options import BackendPlace, StateBackendOptions
from tidegate.state.factory import open_backend
from tidegate.storage.ids import OperatorUid
from tidegate.storage.state.rocksdb.tuning import DatabaseTuning


def _options_of(folder: Path, tuning: DatabaseTuning) -> dict[str, str]:
    """What the database in a folder says of itself."""
    options = StateBackendOptions("rocksdb", directory=str(folder), memory_bytes=6 << 20, database=tuning)
    backend = open_backend(options, BackendPlace(OperatorUid("op"), ("key",), 8, range(8)))
    try:
        (newest,) = sorted(folder.glob("*/OPTIONS-*"))[-1:]
        lines = (line.strip().split("=", 1) for line in newest.read_text(encoding="utf-8").splitlines() if "=" in line)
        return dict(lines)
    finally:
        backend.close()


def test_settings_reach_the_database(tmp_path: Path) -> None:
    """Threads, write buffer, blocks and open files; without them those that tidegate chooses."""
    names = "max_background_jobs", "write_buffer_size", "block_size", "max_open_files"
    chosen = _options_of(tmp_path / "chosen", DatabaseTuning(3, 1 << 20, 4096, 77))
    assert [chosen[name] for name in names] == ["3", str(1 << 20), "4096", "77"]

    usual = _options_of(tmp_path / "usual", DatabaseTuning())
    assert [usual[name] for name in names] == ["2", str(1 << 20), "8192", "512"]

"""RocksDB with many small tables on its levels, as large state has, from a database that is small."""

from __future__ import annotations

from pathlib import Path

import rocksdict


def rewrite_in_small_tables(whole: Path, into: Path, table_bytes: int) -> None:
    """Copy a database into a new one, whose lowest level has uncompressed tables of about `table_bytes`."""
    options = rocksdict.Options(raw_mode=True)
    options.set_target_file_size_base(table_bytes)
    options.set_compression_type(rocksdict.DBCompressionType.none())
    source = rocksdict.Rdict(str(whole), rocksdict.Options(raw_mode=True))
    database = rocksdict.Rdict(str(into), options)
    for key, value in source.items():
        database[key] = value
    source.close()
    database.flush()
    compaction = rocksdict.CompactOptions()
    compaction.set_bottommost_level_compaction(rocksdict.BottommostLevelCompaction.force())
    database.compact_range(None, None, compaction)
    database.close()

"""States in RocksDB whose hot rows are in memory, in columns in front of it."""

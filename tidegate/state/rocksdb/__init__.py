"""The RocksDB backend: stores keyed state on the local disk."""

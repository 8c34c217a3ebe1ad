"""The RocksDB backend: keyed state on the local disk."""

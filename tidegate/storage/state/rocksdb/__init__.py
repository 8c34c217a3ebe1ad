"""RocksDB files: how databases are opened and tuned, and how keys and values are encoded in them."""

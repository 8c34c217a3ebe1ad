"""The RocksDB files of a checkpoint: how databases are opened, and how keys and values are laid out in them."""

"""The form in which keyed state lies in RocksDB: keys, values, and how its files become rows again."""

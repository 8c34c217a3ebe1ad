"""Storage: stores, checkpoint layout and metadata, state files, the event log, output tables.

This package handles bytes and names, and does not depend on actors, Spark or graphs. Every file has a checksum, every
conditional create decides something exactly once, and every fault of the storage is a StorageError.
"""

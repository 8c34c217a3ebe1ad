"""Where bytes rest: stores, checkpoint layout and metadata, state files, the event log, output tables.

Everything here is about bytes and names; nothing knows of actors, Spark or graphs. Every file is checksummed,
every conditional create decides something exactly once, and every fault of the storage is a StorageError.
"""

"""Output tables: data files, and the commit log that decides which of them count.

`table_log.py` has the rules, and writes the log; `log/` has its parts. `table_files.py` reads and writes data files,
`partitions.py` lays them in folders, `compaction/` puts small ones together. `delta/` mirrors a table for Delta Lake.
"""

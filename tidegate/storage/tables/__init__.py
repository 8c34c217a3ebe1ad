"""Output tables: data files, and the commit log that defines which files are part of the table.

`table_log.py` has the rules, and writes the log; `log/` has its parts. `table_files.py` reads and writes data files,
`partitions.py` lays them in folders, `compaction/` merges small files. `delta/` mirrors a table for Delta Lake.
"""

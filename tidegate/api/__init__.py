"""The public API: everything a driver script uses.

- `environment.py` makes environments and runs programs.
- `streams/` holds the methods of streams. `program.py` collects their steps until they are executed.
- `submission/` turns a program into a job.
- `tables/` reads the rows that jobs write.
- `config/` declares and reads the settings.
"""

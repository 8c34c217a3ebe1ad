"""The public API: everything a driver script uses.

- `environment.py` makes environments and runs programs.
- `streams/` holds the methods of streams. `program.py` collects their steps until they are executed.
- `submission/` checks a program and prepares it as a job.
- `tables/` reads the rows that jobs write.
- `config/` declares and reads the settings.
"""

"""Many rows at once on their way into the database: as a file, if there are enough (`row_writer.py`)."""

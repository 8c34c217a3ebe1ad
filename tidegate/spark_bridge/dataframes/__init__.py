"""DataFrames as sources, staged in files that can be replayed exactly, and tables as DataFrames."""

"""DataFrames as sources, staged in files that replay exactly, and tables as DataFrames."""

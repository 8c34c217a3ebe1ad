"""DataFrames in and out: staged as files that replay exactly, tables read back."""

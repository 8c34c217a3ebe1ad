"""The functions and aggregates of SQL by name, and their translations into polars expressions and aggregates."""

"""The functions and aggregates of SQL, by name, with their translations."""

"""The functions and aggregates of SQL, by name: what each makes of its arguments."""

"""Aggregates that are functions over Arrow columns, as those of programs: `aggregate_function.py` says how."""

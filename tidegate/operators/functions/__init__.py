"""Operators that call functions of users, with and without state, or compute polars expressions."""

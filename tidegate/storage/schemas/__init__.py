"""Rows that rest, in the types of today: dictionary columns and widened types."""

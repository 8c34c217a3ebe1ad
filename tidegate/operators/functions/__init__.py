"""Operators without keyed state, over whole batches: functions of users, and polars expressions."""

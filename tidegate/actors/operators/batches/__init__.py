"""Operators over whole batches: functions, expressions, keyed aggregates, watermarks, table sinks; partitioners."""

"""Event time: watermarks that are generated from timestamps, and the rows that are late."""

"""Event time: the watermarks that timestamps make, and the rows that come after theirs."""

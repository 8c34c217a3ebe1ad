"""Output tables for users: reading, compaction, vacuum, and the check that the owner of a table is dead."""

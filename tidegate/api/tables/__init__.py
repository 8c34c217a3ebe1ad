"""Output tables as users have them: reading, compaction, a vacuum, and who owns one."""

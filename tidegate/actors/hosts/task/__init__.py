"""The host of a task: its turns, its timers, and the files of its snapshots."""

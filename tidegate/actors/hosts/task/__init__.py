"""Drives the machine of a task: its turns and timers, the reads of its source, the files of its snapshots and sinks."""

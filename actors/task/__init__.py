"""One subtask as a machine: channels, alignment, operators, snapshots."""

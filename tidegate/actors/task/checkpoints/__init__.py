"""The checkpoints of one subtask: from its barriers to what it acknowledges."""

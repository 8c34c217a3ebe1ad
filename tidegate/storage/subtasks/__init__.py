"""All that one subtask has in a checkpoint: rows, files of its backend, in-flight elements."""

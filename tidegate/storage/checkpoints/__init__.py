"""A job's folder: where everything lies, what completes a checkpoint, the event log."""

"""What a snapshot may be built on: earlier checkpoints, and the log of changes."""

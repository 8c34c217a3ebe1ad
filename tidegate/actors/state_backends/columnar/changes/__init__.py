"""What has changed since a snapshot, and what it was before: for increments, and for a way back."""

"""What a source is, one over data in memory, and hooks for systems outside the job."""

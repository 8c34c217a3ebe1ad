"""The contract of sources, a source over data in memory, and hooks for systems outside the job."""

"""A job as it was submitted, and the transition tables of the job and of its checkpoints."""

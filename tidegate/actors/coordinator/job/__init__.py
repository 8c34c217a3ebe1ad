"""A job as it was submitted, and the phases that it and its checkpoints go through."""

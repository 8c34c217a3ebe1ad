"""A job on Ray: an actor for each task and one for the coordinator."""

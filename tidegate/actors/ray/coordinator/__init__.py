"""The actor of a job: it drives the coordinator's host, deploys attempts, and answers who asks."""

"""Ray in the executors of a Spark cluster that exists: where it can run, how it starts, and how it ends."""

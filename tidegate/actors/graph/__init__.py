"""The two graphs of a job: the stream graph that a program builds, and the job graph that runs."""

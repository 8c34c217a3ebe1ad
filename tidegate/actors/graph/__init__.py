"""The logical graph of a program, and the job graph that runs."""

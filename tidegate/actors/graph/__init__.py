"""The two graphs of a job: the stream graph, which a program builds, and the job graph, which the coordinator
deploys.
"""

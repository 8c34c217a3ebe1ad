"""The edges of a task: queues, credit and order of its input and output channels."""

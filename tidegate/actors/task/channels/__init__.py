"""The channels of a task: queues, sequence numbers and credit of its inputs and outputs, and how much a turn takes."""

"""What runs: the graph, the messages, the machines of tasks and coordinator, operators, and the runtimes."""

"""The engine: graphs, the machines of tasks and coordinator, and the runtimes that drive them.

`coordinator` and `task` decide, without I/O. `drivers` drive them and do the I/O that they order. The runtimes in `ray`
and `local` provide messages, timers and threads, and `runtimes` is their common interface. `graph` has the graphs of a
job, and `restore` reads state from a checkpoint.
"""

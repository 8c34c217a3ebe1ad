"""The engine: job graphs, the state machines of tasks and the coordinator, and the runtimes that run them.

`coordinator` and `task` contain the state machines, which do no I/O. `drivers` feed them events and carry out their
instructions. The runtimes in `ray` and `local` provide messages, timers and threads, and `runtimes` is their common
interface. `graph` has the graphs of a job, and `restore` reads state from a checkpoint.
"""

"""The engine: graphs, the machines of tasks and coordinator, operators, and the runtimes that drive them.

`coordinator` and `task` decide and do no I/O. `hosts` drive them and do the I/O that they ask for; `runtimes` differ in
how a message, a timer or a thread comes about: on Ray, or in one process. `operators` transform batches,
`state_backends` hold their keyed state, `restore` brings state back from a checkpoint.
"""

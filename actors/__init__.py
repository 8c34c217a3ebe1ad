"""The engine: graphs, the machines of tasks and coordinator, operators, and the runtimes that drive them.

`coordinator` and `task` decide and do no I/O. `runtimes` do the I/O that they ask for: on Ray, or in one process.
`operators` transform batches, `state` holds their keyed state, `simulation` runs whole jobs in virtual time.
"""

"""The host of a coordinator: the event log, storage, the lease, hooks, and answers."""

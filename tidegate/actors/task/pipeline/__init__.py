"""The way of rows through a task: source cursor, operator chain, timers, emitter."""

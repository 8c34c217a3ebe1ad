"""How rows pass through a task: read by the source cursor, processed by the operator chain, sent by the emitter."""

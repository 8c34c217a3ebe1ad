"""The folder of a job: its layout, the metadata that completes a checkpoint, the event log, the lease."""

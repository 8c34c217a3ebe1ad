"""Deletes what nobody needs: checkpoints, what a job leaves behind, orphans; and decides what may go."""

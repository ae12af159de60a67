"""Changing a fleet while it serves: waves, drain, gates, rollback, and the journal of all that."""

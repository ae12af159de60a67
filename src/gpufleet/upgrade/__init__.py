"""Change a fleet while it serves: waves, drain, gates, rollback, and their journal."""

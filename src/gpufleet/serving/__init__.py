"""A stage's unit, credentials, flags, readiness, status, logs and restarts."""

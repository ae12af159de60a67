"""Stages on nodes: units, credentials, flags, readiness, status, logs and restarts."""

"""remote: see docs/architecture.md."""

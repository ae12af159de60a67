"""fleet: see docs/architecture.md."""

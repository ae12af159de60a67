"""probe: see docs/architecture.md."""

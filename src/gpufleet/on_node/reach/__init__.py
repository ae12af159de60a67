"""reach: see docs/architecture.md."""

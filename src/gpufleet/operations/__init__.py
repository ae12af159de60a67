"""operations: see docs/architecture.md."""

"""node: see docs/architecture.md."""

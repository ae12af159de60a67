"""change: see docs/architecture.md."""

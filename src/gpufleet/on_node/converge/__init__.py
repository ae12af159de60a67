"""converge: see docs/architecture.md."""

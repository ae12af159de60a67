"""artifacts: see docs/architecture.md."""

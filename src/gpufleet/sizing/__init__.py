"""sizing: see docs/architecture.md."""

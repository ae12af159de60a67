"""monitoring: see docs/architecture.md."""

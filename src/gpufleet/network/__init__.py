"""network: see docs/architecture.md."""

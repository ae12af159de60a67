"""rank: see docs/architecture.md."""

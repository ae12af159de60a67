"""launch_rules: see docs/architecture.md."""

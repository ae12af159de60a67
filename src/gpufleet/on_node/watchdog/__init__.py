"""watchdog: see docs/architecture.md."""

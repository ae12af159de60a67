"""multinode: see docs/architecture.md."""

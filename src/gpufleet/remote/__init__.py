"""Query nodes over SSH in parallel, with time limits."""

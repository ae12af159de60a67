"""Questions to nodes over SSH, many at once, with deadlines."""

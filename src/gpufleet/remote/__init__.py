"""Query nodes over SSH, in parallel and with deadlines."""

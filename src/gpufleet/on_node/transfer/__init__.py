"""Programs that copy releases and models between nodes, and put them in place."""

"""Programs that test whether the nodes of a replica reach each other."""

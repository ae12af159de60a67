"""Programs that test whether the nodes of a replica can reach each other."""

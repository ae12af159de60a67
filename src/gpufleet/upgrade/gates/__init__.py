"""Judge whether a replica is as good after a change as before. Pure."""

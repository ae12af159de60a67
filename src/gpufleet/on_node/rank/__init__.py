"""One rank of a replica over several nodes."""

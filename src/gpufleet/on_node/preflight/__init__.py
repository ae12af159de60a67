"""RUNS ON THE NODE: what has to be true before users come."""

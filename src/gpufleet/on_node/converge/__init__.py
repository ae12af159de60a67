"""A node's state, read in one go, and files put in place."""

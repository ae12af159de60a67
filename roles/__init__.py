"""Define roles; each has everything that one purpose needs on a node."""

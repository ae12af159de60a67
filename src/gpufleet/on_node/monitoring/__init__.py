"""Facts of a node as metrics."""

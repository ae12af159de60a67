"""Changes of a node while the fleet serves."""

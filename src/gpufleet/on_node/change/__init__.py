"""Programs that change a node while the fleet serves."""

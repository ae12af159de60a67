"""Programs that read a node's state and change its files, packages, units and settings."""

"""Plan an upgrade: its groups, its waves, and its duration. Pure."""

"""Plan an upgrade: what changes together, in which waves, and how long it takes. Pure."""

"""Third-party modules carried unmodified, because the probe takes them along to the nodes."""

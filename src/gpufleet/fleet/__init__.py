"""Probe, check and plan all nodes of a fleet, once per run."""

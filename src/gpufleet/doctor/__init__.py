"""Diagnose a fleet: its problems, worst first, each with evidence and what to do."""

"""Diagnose a fleet: its problems, worst first, each with evidence and the next step."""

"""Measure what a converge with nothing to do costs: run.py."""

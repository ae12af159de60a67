"""Explain failures from logs, by rules that are data."""

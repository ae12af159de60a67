"""Explain failures from logs. The rules for this are data."""

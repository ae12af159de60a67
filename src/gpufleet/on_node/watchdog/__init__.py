"""Servers that no longer get on, found and restarted."""

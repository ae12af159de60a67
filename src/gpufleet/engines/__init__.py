"""Engines that serve models: what differs between them, each in a folder of its own."""

"""
Write a fleet's state as a page for people without access, and as a manifest to rebuild the fleet.
"""

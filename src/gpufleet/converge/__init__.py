"""
Desired and observed state of a node as values, their difference, and the commands for it.  Pure.
"""

"""
Compare the desired and the observed state of a node, and build the commands for the difference.
Pure.
"""

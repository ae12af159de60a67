"""
Compare the desired state of a node with its observed state, and build commands for the difference.

Pure.
"""

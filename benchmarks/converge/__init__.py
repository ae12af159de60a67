"""What does a converge of a fleet cost that has nothing to do?  See run.py."""

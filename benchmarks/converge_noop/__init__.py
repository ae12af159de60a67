"""How much does a converge cost that has nothing to do?  See run.py."""

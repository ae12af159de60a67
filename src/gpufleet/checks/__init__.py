"""Judge nodes by their probe and declaration, and return findings. Pure.

`catalog.checks` names the checks, the modules here implement them by subject, and `evaluate` runs
all of them.
"""

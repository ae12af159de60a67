"""
Judge nodes by their probes and their settings, and return findings. Pure.

`catalog.checks` lists the checks, the modules here implement them by subject, and `evaluate` runs
all of them.
"""

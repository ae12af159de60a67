"""Node checks: a probe's document and the declaration in, findings out. Pure.

`catalog.checks` names the checks, the modules here hold them by subject, `evaluate` runs them all.
"""

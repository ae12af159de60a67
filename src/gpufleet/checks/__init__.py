"""Is a node fit to serve? Pure: a probe's document and what is declared give findings.

`catalog.checks` names the checks, the modules here hold them by subject, `evaluate` runs them all.
"""

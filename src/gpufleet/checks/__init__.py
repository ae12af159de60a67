"""Is a node fit to serve? Pure: a probe's document and what is declared give findings.

`catalogue` names the checks, the modules beside it hold them by subject, `evaluate` runs them all.
"""

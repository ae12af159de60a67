"""
The one list of metrics: those that rules, dashboards and gates may use, by the server that exports
them.
"""

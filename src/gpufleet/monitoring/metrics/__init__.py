"""The one list of metrics: what rules, dashboards and gates may name, by who serves it."""

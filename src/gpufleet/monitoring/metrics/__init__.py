"""The list of metrics for rules, dashboards and gates, by the server that exports them."""

"""List the metrics that rules, dashboards and gates use, by the server that exports them."""

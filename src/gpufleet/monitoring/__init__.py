"""Define a fleet's metrics, rules, dashboards, scrape configuration and routes. Pure.

`metrics/` is the only list of metrics. Rules and panels use only its metrics, and tests compare
both with the answers of real servers.
"""

"""
Define the fleet's metrics, rules, dashboards, scrape configuration and alert routes. Pure.

`metrics/` is the only list of metrics. Rules and panels may use only metrics in this list, and
tests compare the list with the answers of real servers.
"""

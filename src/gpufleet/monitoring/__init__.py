"""Metrics of a fleet, and their rules, dashboards, scrape configuration and routes. Pure.

`metrics/` is the one list of metrics. Rules and panels use only these, and tests compare both with
the answers of real servers.
"""

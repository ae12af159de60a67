"""Metrics of a fleet, and their rules, dashboards, scrape configuration and routes. Pure.

`metrics/` is the one list of metrics. Rules and panels name nothing that is not in it, and tests
hold both against what real servers answer.
"""

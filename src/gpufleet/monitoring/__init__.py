"""What is measured on a fleet, and what follows from it: rules, dashboards, scraping, routes. Pure.

`metrics/` is the one list of metrics. Rules and panels name nothing that is not in it, and tests
hold both against what real servers answer.
"""

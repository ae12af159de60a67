"""Grafana dashboards, built of panels whose queries name metrics of `metrics/` only."""

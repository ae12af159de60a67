"""Grafana dashboards, whose panels query only metrics of `metrics/`."""

"""Looks at our dashboards without a Grafana: the same JSON, the same queries, drawn as one page.

It reads what `gpufleet.monitoring.dashboards` writes for Grafana and nothing else, so a panel that
is empty here is empty there. `questions` asks Prometheus, `numbers` writes values with their unit,
`drawing` makes a panel, `page` all of them, `browser` a picture.
"""

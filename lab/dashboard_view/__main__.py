"""`python -m lab.dashboard_view --prometheus URL --out DIR [--screenshot]`."""

from __future__ import annotations

import json
import time
from pathlib import Path

import click

from gpufleet.errors import FleetError
from gpufleet.monitoring.dashboards.grafana import dashboards
from lab.dashboard_view.browser import picture
from lab.dashboard_view.page import page, size
from lab.dashboard_view.questions import Asking, Span

POINTS = 180  # of a curve: more than that is not seen


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--prometheus", required=True, metavar="URL", help="As http://192.0.2.10:9090.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="A folder; made.")
@click.option("--minutes", type=float, help="How far back (default: as each dashboard does).")
@click.option("--at", type=float, help="The end, in seconds since 1970 (default: now).")
@click.option("--scrape", default=15, show_default=True, help="Seconds between two scrapes.")
@click.option("--variable", "variables", multiple=True, metavar="NAME=VALUE", help="As chosen.")
@click.option("--only", multiple=True, metavar="NAME", help="As fleet, node, gpu; repeatable.")
@click.option("--theme", type=click.Choice(["auto", "light", "dark"]), default="auto")
@click.option("--screenshot", is_flag=True, help="A PNG of each page, by a Chromium.")
def main(
    *,
    prometheus: str,
    out: Path,
    minutes: float | None,
    at: float | None,
    scrape: int,
    variables: tuple[str, ...],
    only: tuple[str, ...],
    theme: str,
    screenshot: bool,
) -> None:
    """Draw our dashboards from what a Prometheus has."""
    wanted = dict(variable.split("=", 1) for variable in variables)
    out.mkdir(parents=True, exist_ok=True)
    for file, text in dashboards().items():
        name = file.removeprefix("gpufleet-").removesuffix(".json")
        if only and name not in only:
            continue
        dashboard = json.loads(text)
        hours = float(dashboard["time"]["from"].removeprefix("now-").removesuffix("h"))
        length = 60 * (minutes or hours * 60)
        end = at or time.time()
        asking = Asking(
            prometheus.rstrip("/"),
            Span(end - length, end, max(scrape, round(length / POINTS))),
            scrape,
        )
        values = asking.chosen(dashboard, wanted)
        answers = {
            panel["id"]: asking.answers(panel, values)
            for panel in dashboard["panels"]
            if panel["type"] != "row"
        }
        marks = asking.marks(dashboard, values)
        html = out / f"{name}.html"
        html.write_text(page(dashboard, values, answers, asking.span, marks, theme=theme))
        click.echo(html)
        if screenshot:
            picture(html, size(dashboard), out / f"{name}.png")
            click.echo(out / f"{name}.png")


if __name__ == "__main__":
    try:
        main()
    except FleetError as error:
        raise SystemExit(str(error)) from error

"""Render a measurement as one HTML file with charts, tables and a list of what is not known. Pure.

The page loads no fonts and images, and runs no scripts. Its Content-Security-Policy enforces this.
Colours follow the reader's light or dark mode. The report of an upgrade uses the same colours.
Texts of nodes, settings and operators are escaped.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from gpufleet.formatting import node_ranges
from gpufleet.load_test.level import LevelSummary
from gpufleet.load_test.level_charts import STYLE, Chart, Point, Series, draw, value_text
from gpufleet.load_test.outcomes import Contract
from gpufleet.load_test.rate_search import bend_sentences
from gpufleet.load_test.result import Measurement, Searched
from gpufleet.load_test.time_series import TimeSeries
from gpufleet.sanitize import html_page, html_text

_STYLE = """
:root { color-scheme: light dark; --ground: #ffffff; --ink: #1b1b1f; --pale: #5f6368;
  --line: #dadce0; --own: #6b7280; --load: #3367d6; --judge: #8e44ad; --soak: #2e7d32;
  --back: #b45309; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ground: #17181c; --ink: #e6e6ea; --pale: #a0a4ab;
  --line: #3a3c42; --own: #9aa0aa; --load: #7ba6ff; --judge: #c792ea; --soak: #6fcf7c;
  --back: #ffa657; --bad: #ff7b72; } }
body { background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, sans-serif;
  margin: 2rem auto; max-width: 1200px; padding: 0 1rem; }
h1 { font-size: 1.4rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin-top: 2rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 .2rem; }
p { margin: .3rem 0; } .pale { color: var(--pale); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .8rem .25rem 0; text-align: left;
  vertical-align: top; } td { white-space: pre-line; }
.wide { overflow-x: auto; }
ul { padding-left: 1.2rem; } li { white-space: pre-line; overflow-wrap: anywhere; }
"""

_VERDICTS = {"kept": "kept", "missed": "missed", "not known": "unknown"}
_LATENCIES = (("TTFT", "ttft", "ttft_seconds"), ("ITL", "itl", "itl_seconds"),
              ("End to end", "e2e", "e2e_seconds"))  # fmt: skip
_PERCENTILES = (("p50", "a"), ("p95", "b"), ("p99", "c"))

_COLUMNS = (
    "verdict", "kept", "interval", "requests", "failed", "TTFT p99", "ITL p99", "end to end p99",
    "in the system", "output tokens/s", "seconds", "warm-up", "why",
)  # fmt: skip

_LATENCY_NOTE = (
    "Latencies are counted from the intended arrival of a request. Only answered requests have "
    "latencies. The contract's ITL is the mean of each answer, but the chart's ITL covers all "
    "single gaps between chunks. The grey band lies between the highest load at which the "
    "contract was met and the lowest load at which it was not met."
)
_LOOPS_NOTE = (
    "In a closed loop, a client sends its next request only after an answer, so a queue slows "
    "down new arrivals and stays small. Real users do not wait for each other, so use the result "
    "of the open loop to size the fleet."
)
_TIME_NOTE = (
    "The time axis shows when requests were due. A dotted line shows where a level begins. "
    "Running requests, waiting requests and KV cache are vLLM's values for all clients. ITL is "
    "the mean of each answer."
)
_MOST_SECONDS = 600.0
"""If a run takes longer than this time in seconds, the time axis is in minutes."""
_SHARE_NOTE = (
    "The whiskers show Wilson's interval for the level's effective number of independent "
    "requests. A level is judged kept or missed only if its whole interval lies on one side of "
    "the line."
)


def result_page(found: Measurement) -> str:
    """Return the text of the page."""
    title = f"{found.model}, {found.target}"
    when = found.when.astimezone(dt.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    how = f"{found.served_by}, measured {when} by gpufleet {found.version}"
    body = [
        f"<h1>{html_text(title)}</h1>",
        f'<p class="pale">{html_text(how)}</p>',
        f"<p><strong>{html_text(_answer(found))}</strong></p>",
        *(
            f"<p>{html_text(each)}</p>"
            for each in (found.found.why, *bend_sentences(found.levels))
            if each
        ),
        "<h2>Contract</h2>",
        _list(_promises(found.contract)),
        *(_both_loops(found, found.closed) if found.closed else ()),
        *_charts(_drawings(found)),
        *_run(found),
        "<h2>Levels</h2>",
        _levels(found) if found.levels else "<p>No level was measured.</p>",
        *(
            ["<h2>Levels of the closed loop</h2>", _levels(found.as_closed())]
            if found.closed
            else []
        ),
        "<h2>What was measured</h2>",
        _table(("what", "value"), _subject(found)),
        "<h2>Workload</h2>",
        _table(("what", "value"), [("loop", found.loop), *_flat(found.workload)]),
        "<h2>Was the client the bottleneck?</h2>",
        _list(_client(found)),
        "<h2>What is not known</h2>",
        _list(_unknown(found)),
        *(["<h2>Notes</h2>", _list(found.notes)] if found.notes else []),
    ]
    return html_page(title, _STYLE + STYLE, ["<main>", *body, "</main>"])


def _answer(found: Measurement) -> str:
    """Return the result as one sentence."""
    kept, missed = found.found.kept, found.found.missed
    unit = _unit(found)
    if kept is None and missed is None:
        return f"The capacity of this target is unknown ({found.found.status})."
    if kept is None:
        return f"The contract is met at no measured load, not even at {missed:.4g} {unit}."
    many = found.found.concurrency
    about = "" if many is None else f" ({many:.3g} requests in the system on average)"
    if missed is None:
        return (
            f"The contract is met at {kept:.4g} {unit}{about}. No measured load was too high to "
            "meet it."
        )
    return f"The contract is met at {kept:.4g} {unit}{about}, and not met at {missed:.4g}."


def _promises(contract: Contract) -> Iterator[str]:
    for name, seconds in (
        ("time to first token (TTFT)", contract.ttft_seconds),
        ("mean time between the tokens of an answer (ITL)", contract.itl_seconds),
        ("time to the whole answer (end to end)", contract.e2e_seconds),
    ):
        if seconds is not None:
            yield f"{name}: at most {value_text(seconds, 's')}"
    yield (
        f"all of these limits must hold for a share of {contract.share:.4g} of requests or more, "
        f"with a confidence of {contract.confidence:.4g}. A failed request counts as one that "
        "does not meet them"
    )


# -- charts


def _charts(drawings: Iterable[tuple[str, Chart, str]]) -> Iterator[str]:
    """Yield charts side by side, and the notes below them."""
    drawn = [(name, svg, note) for name, chart, note in drawings if (svg := draw(chart))]
    if drawn:
        figures = (
            f"<figure><figcaption>{html_text(name)}</figcaption>{svg}</figure>"
            for name, svg, _ in drawn
        )
        yield f'<div class="charts">{"".join(figures)}</div>'
        yield from (f'<p class="pale">{html_text(note)}</p>' for _, _, note in drawn if note)


def _drawings(found: Measurement) -> Iterator[tuple[str, Chart, str]]:
    unit, band = _unit(found), _band(found)
    shares = [_share_point(each, unit) for each in found.levels if each.requests]
    yield (
        "Share of requests that met the contract",
        Chart(
            "share of requests that met the contract, by load", unit, "%",
            (Series("kept", "unknown", shares),), found.contract.share, band, top=1.0,
        ),
        _SHARE_NOTE,
    )  # fmt: skip
    last = _LATENCIES[-1][0]
    for name, key, promise in _LATENCIES:
        series = [
            Series(p, style, [*_latency_points(found.levels, key, p, unit)])
            for p, style in _PERCENTILES
        ]
        limit = getattr(found.contract, promise)
        chart = Chart(f"{name} by load", unit, "s", series, limit, band, logarithmic=True)
        yield name, chart, _LATENCY_NOTE if name == last else ""
    for name, key in (
        ("Output", "output_tokens_per_second"),
        ("Prompt", "prompt_tokens_per_second"),
    ):
        tokens = [
            Point(each.load, rate, f"{each.load:.4g} {unit}: {rate:.4g} tokens/s")
            for each in found.levels
            if (rate := getattr(each, key))
        ]
        series = [Series(name.lower(), "a", tokens)]
        chart = Chart(
            f"{name.lower()} tokens per second by load", unit, "tokens/s", series, band=band
        )
        yield f"{name} tokens per second", chart, ""


def _run(found: Measurement) -> Iterator[str]:
    """Yield the section with values over the time of the run."""
    if found.series is None:
        return
    yield "<h2>Over the time of the run</h2>"
    yield from _charts(_time_drawings(found, found.series))
    yield f'<p class="pale">{html_text(_TIME_NOTE)}</p>'


def _time_drawings(found: Measurement, of: TimeSeries) -> Iterator[tuple[str, Chart, str]]:
    last = len(of.rate) * of.step_seconds
    unit, scale = ("s", 1.0) if last <= _MOST_SECONDS else ("min", 1 / 60)
    levels = [*found.levels, *(found.closed.levels if found.closed else ())]
    marks = [
        (at * scale, f"{level.load:.4g} {level.unit}")
        for at, level in zip(of.levels, levels, strict=False)
    ]

    def line(name: str, style: str, values: Sequence[float | None]) -> Series:
        step = of.step_seconds * scale
        points = [
            Point((number + 0.5) * step, value, "")
            for number, value in enumerate(values)
            if value is not None
        ]
        return Series(name, style, points, step)

    def chart(
        title: str, y_unit: str, series: Sequence[Series], limit: float | None = None, **more: Any
    ) -> tuple[str, Chart, str]:
        about = f"{title}, over time"
        return title, Chart(about, unit, y_unit, series, limit, marks=marks, **more), ""

    failed = [line("failed", "missed", of.failed)] if any(of.failed) else []
    yield chart("Requests due per second", "", [line("due", "a", of.rate), *failed])
    yield chart(
        "Requests in the servers",
        "",
        [line("running", "a", of.running), line("waiting", "c", of.waiting)],
    )
    yield chart("KV cache in use", "%", [line("mean", "a", of.kv_usage)], top=1.0)
    for name, limit, p50, p95 in (
        ("TTFT", found.contract.ttft_seconds, of.ttft_p50, of.ttft_p95),
        ("ITL", found.contract.itl_seconds, of.itl_p50, of.itl_p95),
    ):
        series = [line("p50", "a", p50), line("p95", "b", p95)]
        yield chart(f"{name} of each step's requests", "s", series, limit, logarithmic=True)


def _both_loops(found: Measurement, closed: Searched) -> Iterator[str]:
    """Yield the table that compares the open loop with the closed one."""
    yield "<h2>Open loop beside closed loop</h2>"
    yield _table(
        ("loop", "keeps", "misses", "answers/s", "in the system", "TTFT p99", "ended"),
        [
            _loop_row("open", found.searched, "requests/s"),
            _loop_row("closed", closed, "concurrent requests"),
        ],
    )
    yield f'<p class="pale">{html_text(_LOOPS_NOTE)}</p>'


def _loop_row(name: str, of: Searched, unit: str) -> tuple[str, ...]:
    best = of.best
    kept, missed = (
        "" if load is None else f"{load:.4g} {unit}" for load in (of.found.kept, of.found.missed)
    )
    if best is None:
        return name, kept or "no load", missed, "", "", "", of.found.status
    ttft = value_text(best.ttft["p99"], "s") if "p99" in best.ttft else ""
    answers, inside = f"{best.answered_per_second:.3g}", f"{best.mean_concurrency:.3g}"
    return name, kept, missed, answers, inside, ttft, of.found.status


def _share_point(level: LevelSummary, unit: str) -> Point:
    share = level.kept / level.requests
    said = (
        f"{level.load:.4g} {unit}: {share:.1%} of requests met the contract ({level.low:.1%} to "
        f"{level.high:.1%}), {level.verdict}"
    )
    return Point(level.load, share, said, level.low, level.high, _VERDICTS[level.verdict])


def _latency_points(
    levels: Iterable[LevelSummary], key: str, percentile: str, unit: str
) -> Iterator[Point]:
    for level in levels:
        values: Mapping[str, float] = getattr(level, key)
        if percentile in values:
            seconds = values[percentile]
            said = f"{level.load:.4g} {unit}: {percentile} {value_text(seconds, 's')}"
            yield Point(level.load, seconds, said)


def _band(found: Measurement) -> tuple[float, float] | None:
    kept, missed = found.found.kept, found.found.missed
    return None if missed is None else (kept or 0.0, missed)


# -- tables


def _levels(found: Measurement) -> str:
    return _table((_unit(found), *_COLUMNS), [_row(each) for each in found.levels])


def _row(of: LevelSummary) -> tuple[str, ...]:
    failed = ", ".join(f"{count} x {reason}" for reason, count in sorted(of.errors.items()))
    return (
        f"{of.load:.4g}",
        of.verdict + (f" ({of.ended})" if of.ended != "resolved" else ""),
        f"{of.kept / of.requests:.2%}" if of.requests else "",
        f"{of.low:.2%} to {of.high:.2%}",
        str(of.requests),
        failed or "0",
        *(value_text(v["p99"], "s") if "p99" in v else "" for v in (of.ttft, of.itl, of.e2e)),
        f"{of.mean_concurrency:.3g}",
        f"{of.output_tokens_per_second:,.0f}",
        f"{of.seconds:.0f}",
        f"{of.warm_up_seconds:.0f}",
        of.why,
    )


def _subject(found: Measurement) -> list[tuple[str, str]]:
    of = found.subject
    gpus = ", ".join(f"{count} x {name}" for name, count in sorted(of.gpus.items()))
    return [
        ("weights", of.weights),
        ("revision", of.revision or "none"),
        ("release of vLLM", of.release or "not known"),
        ("GPUs of a replica", gpus or "none"),
        ("driver", of.driver or "not known"),
        ("replicas", found.served_by),
        ("nodes", node_ranges(of.nodes)),
        ("arguments", "\n".join(of.arguments)),
        ("fingerprint", of.fingerprint.digest),
    ]


def _flat(values: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{at}{name}.")
        else:
            yield f"{at}{name}", value if isinstance(value, str) else json.dumps(value)


# -- what is proven, and what is not


def _client(found: Measurement) -> Iterator[str]:
    of, most = found.client, _highest_rate(found)
    yield f"{of.processes} process{'es' if of.processes != 1 else ''} on {of.place}"
    if of.ceiling is not None:
        part = f", and the highest level used {most / of.ceiling:.0%} of that" if most else ""
        yield f"the client can send at most {of.ceiling:.4g} requests/s{part}"
    if of.cpu_seconds is not None:
        yield f"each request needs {of.cpu_seconds * 1000:.3g} ms of the client's processor time"
    if of.lag_p99 is not None:
        yield (
            f"99 % of requests were sent within {value_text(of.lag_p99, 's')} of their intended "
            "arrival. The latencies include this delay"
        )


def _unknown(found: Measurement) -> Iterator[str]:
    of, most = found.client, _highest_rate(found)
    unit = _unit(found)
    # If a level was tried twice, the last try counts.
    for level in {each.load: each for each in found.levels}.values():
        if level.verdict == "not known":
            yield f"{level.load:.4g} {unit}: {level.why}"
    if of.ceiling is None or (most or 0) > of.ceiling:
        yield (
            "whether the client could send as many requests as the highest level needs: its "
            "maximum rate is "
        ) + ("not known" if of.ceiling is None else "lower")
    if of.lag_p99 is None and found.loop == "open":
        yield "how late the client sent its requests"
    if found.subject.driver is None:
        yield "the driver's version"
    for name, key, _ in _LATENCIES:
        if found.levels and not any(getattr(each, key) for each in found.levels):
            yield f"{name}: no level has this latency"
    yield (
        "how far the percentiles of latencies are from the true ones, because they are shown "
        "without intervals"
    )
    yield "the result for other lengths, prefixes and arrivals than those of this workload"
    if found.loop == "closed":
        yield (
            "how long requests would queue, because in a closed loop a client sends its next "
            "request only after an answer"
        )


def _highest_rate(found: Measurement) -> float | None:
    return max((each.rate for each in found.levels if each.rate is not None), default=None)


def _unit(found: Measurement) -> str:
    return "requests/s" if found.loop == "open" else "concurrent requests"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    heads = "".join(f"<th>{html_text(each)}</th>" for each in head)
    lines = "".join(
        "<tr>" + "".join(f"<td>{html_text(each)}</td>" for each in row) + "</tr>" for row in rows
    )
    return f'<div class="wide" tabindex="0"><table><tr>{heads}</tr>{lines}</table></div>'


def _list(items: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{html_text(each)}</li>' for each in items)}</ul>"

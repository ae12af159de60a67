"""PromQL selectors of server metrics, for all engines at once.  Pure."""

from __future__ import annotations

from gpufleet.engines.engine import HISTOGRAMS, Measure, engines

JOBS = 'job="vllm"'
"""The label matcher for server targets of every engine (monitoring/metrics/metric.py, Job.VLLM)."""


def metric(measure: Measure, labels: str = "", *, part: str = "") -> str:
    """
    Return the selector of a measure: an instant vector of its series of all engines.

    `labels` are matchers without braces. `part` is the suffix of a histogram's series, `_bucket`
    unless given. Only the newest name of each engine is selected. A server has the metrics of only
    one engine, so functions that drop the name, such as rate(), get no duplicate series.
    """
    suffix = part or ("_bucket" if measure in HISTOGRAMS else "")
    names = [found[0] + suffix for each in engines() if (found := each.metrics.get(measure))]
    if len(names) == 1:
        return f"{names[0]}{{{labels}}}" if labels else names[0]
    joined = ",".join(filter(None, (f'__name__=~"{"|".join(names)}"', labels)))
    return f"{{{joined}}}"

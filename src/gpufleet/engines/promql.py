"""PromQL selectors of server metrics, for all engines at once.  Pure."""

from __future__ import annotations

from gpufleet.engines.engine import HISTOGRAMS, Measure, engines

CLIENTS_PATHS = "/v[12]/.+|/(classify|pooling|rerank|score)"
"""Regex of the paths of clients' requests: probes, scrapes and lists of models are not of them."""

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


def responses(labels: str, *, only: str = "", but: str = "") -> str:
    """
    Return the selector of the counters of HTTP responses to clients, of all engines.

    `labels` are matchers without braces. `only` and `but` are regexes of statuses, such as `5..`,
    for `503` and `5xx`. Each engine has its own labels; the series of others lack them, which the
    empty alternative matches.
    """
    counters = [each.responses for each in engines()]
    matchers = [f'__name__=~"{"|".join(each.name for each in counters)}"', labels, 'method="POST"']
    for each in counters:
        matchers.append(f'{each.path}=~"|{CLIENTS_PATHS}"')
        matchers += [f'{each.status}=~"|{only}"'] if only else []
        matchers += [f'{each.status}!~"{but}"'] if but else []
    return f"{{{','.join(matchers)}}}"


def with_status(vector: str) -> str:
    """Return a vector of `responses` with the status of every engine in the label `status`."""
    # A series has the label of its engine alone; the others are empty.
    labels = ", ".join(f'"{each.responses.status}"' for each in engines())
    return f'label_join({vector}, "status", "", {labels})'

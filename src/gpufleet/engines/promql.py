"""Build PromQL selectors of server metrics that match all engines at once. Pure."""

from __future__ import annotations

from gpufleet.engines.engine import HISTOGRAMS, Measure, engines

CLIENTS_PATHS = "/v[12]/.+|/(classify|pooling|rerank|score)"
"""
A regex for the paths of clients' requests. It does not match probes, scrapes and lists of models.
"""

JOBS = 'job="vllm"'
"""The label matcher for the servers of every engine (monitoring/metrics/metric.py, Job.VLLM)."""


def metric(measure: Measure, labels: str = "", *, part: str = "") -> str:
    """
    Return the selector of a measure.

    It selects the series of all engines. `labels` are label matchers without braces. `part` is the
    suffix of a histogram's series, by default `_bucket`. Only the newest metric name of each engine
    is selected. A server has the metrics of only one engine. So functions that drop the metric's
    name, such as rate(), do not get duplicate series.
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

    `labels` are label matchers without braces. `only` and `but` are regexes of statuses to include
    and to exclude, such as `5..`, which matches both `503` and `5xx`. Each engine has its own label
    names. Series of other engines do not have these labels, so each matcher also accepts the empty
    value.
    """
    counters = [each.responses for each in engines()]
    matchers = [f'__name__=~"{"|".join(each.name for each in counters)}"', labels, 'method="POST"']
    for each in counters:
        matchers.append(f'{each.path}=~"|{CLIENTS_PATHS}"')
        matchers += [f'{each.status}=~"|{only}"'] if only else []
        matchers += [f'{each.status}!~"{but}"'] if but else []
    return f"{{{','.join(matchers)}}}"


def with_status(vector: str) -> str:
    """
    Return a vector of `responses` in which the label `status` has the status for every engine.
    """
    # A series has only the label of its own engine. The labels of other engines are empty.
    labels = ", ".join(f'"{each.responses.status}"' for each in engines())
    return f'label_join({vector}, "status", "", {labels})'

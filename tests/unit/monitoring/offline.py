"""Do expressions find anything in what a server really served? Without any server.

A recording is a /metrics as it came off the wire, with the labels that our scrapes add. What an
expression asks for must be in it: names, values of labels, labels that it groups and joins by.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import promql_parser as promql
from prometheus_client.parser import text_string_to_metric_families

from gpufleet.engines.engine import engine as engine_of_name
from gpufleet.engines.engine import engines
from gpufleet.monitoring.metrics.metric import Job, Metric
from gpufleet.monitoring.metrics.prometheus_metrics import MADE
from gpufleet.monitoring.rules.rule import Recording

RECORDED = Path(__file__).parent / "recorded"

# What scrapes add (monitoring/prometheus.py); `server` is there where a stage has several.
TARGET = {
    Job.NODE: {"instance": "gpu-01"},
    Job.DCGM: {"instance": "gpu-01"},
    Job.VLLM: {"instance": "gpu-01", "stage": "tiny-0", "model": "tiny", "server": "1"},
    Job.GATEWAY: {"instance": "gateway-01"},
    Job.PROMETHEUS: {"instance": "monitor-01"},
    Job.ALERTMANAGER: {"instance": "monitor-01"},
}

Labels = Mapping[str, str | None]
"""Labels of a series; None: any value."""


@dataclass(frozen=True)
class Sample:
    """One line of a recording."""

    name: str
    labels: Labels
    value: float = 1.0


@dataclass(frozen=True)
class Recorded:
    """
    What series there are.

    Attributes:
        samples: every line of /metrics, with the labels that the scrape adds.
        types: {name of a metric: counter, gauge, histogram}; of those that have one.
    """

    samples: tuple[Sample, ...]
    types: Mapping[str, str]

    def named(self, name: str) -> Iterator[Sample]:
        """Yield the samples of a name."""
        return (sample for sample in self.samples if sample.name == name)

    def __add__(self, other: Recorded) -> Recorded:
        return Recorded(self.samples + other.samples, {**self.types, **other.types})


def recorded(name: str, job: Job) -> Recorded:
    """Return the recording of that name: "vllm-0.32.0"."""
    labels = {"job": str(job), **TARGET[job]}
    families = list(text_string_to_metric_families((RECORDED / f"{name}.txt").read_text()))
    samples = tuple(
        Sample(sample.name, {**sample.labels, **labels}, sample.value)
        for family in families
        for sample in family.samples
    )
    return Recorded(
        samples,
        {sample.name: family.type for family in families for sample in family.samples},
    )


def listed(metrics: Iterable[Metric]) -> Recorded:
    """Return what metrics of the catalogue would have, with any values of their labels."""
    samples, types = [], {}
    for metric in metrics:
        labels: dict[str, str | None] = dict.fromkeys(metric.labels)
        # What Prometheus makes itself has the labels of any target; an alert's those of its rule.
        target: Labels = (
            dict.fromkeys(["job", "gpu", *TARGET[Job.VLLM]])
            if metric in MADE
            else {"job": str(metric.job), **TARGET[metric.job]}
        )
        for series in metric.series:
            le = {"le": None} if series.endswith("_bucket") else {}
            samples.append(Sample(series, {**labels, **le, **target}))
            types[series] = metric.type
    return Recorded(tuple(samples), types)


def computed(recordings: Iterable[Recording]) -> Recorded:
    """Return what recording rules would make."""
    return Recorded(
        tuple(Sample(each.record, dict.fromkeys(each.labels)) for each in recordings),
        {
            each.record: "counter" if each.record.endswith("_total") else "gauge"
            for each in recordings
        },
    )


def of_engine(expression: str, name: str = "vllm") -> str:
    """
    Return an expression that asks for one engine's series, for one that asks for those of all.

    What only others have stays.

    >>> of_engine('rate({__name__=~"sglang:a_total|vllm:a_total",model="m"}[5m])')
    'rate(vllm:a_total{model="m"}[5m])'
    """
    engine = engine_of_name(name)
    prefixes = engine.prefix, engine.responses.name

    def own(found: re.Match[str]) -> str:
        names = [each for each in found[1].split("|") if each.startswith(prefixes)]
        return f"{names[0]}{{" if names else found[0]

    expression = re.sub(r'\{__name__=~"([^"]+)",?', own, expression).replace("{}", "")
    # Series lack the labels of other engines, which the empty alternative matches.
    counters = {each.responses for each in engines()}
    others = {label for each in counters for label in (each.path, each.status)} - {
        engine.responses.path,
        engine.responses.status,
    }
    expression = re.sub(rf',({"|".join(others)})(=~"\||!~")[^"]*"', "", expression)
    return expression.replace('=~"|', '=~"')


def missing(expression: str, recording: Recorded, engine: str = "vllm") -> list[str]:
    """
    Return what an expression asks for and the recording has not; [] for an expression that works.

    Names of metrics, values of labels in selectors, labels in `by`, `on` and `group_left`, `le` of
    a histogram's quantile, and rates of what is no counter. Expressions are PromQL: variables of
    dashboards have to be replaced first.
    """
    found: list[str] = []
    _labels(promql.parse(of_engine(expression, engine)), recording, found)
    return list(dict.fromkeys(found))


def selectors(expression: str) -> dict[str, str]:
    """Return every selector of an expression as {it: its range, "" for none}."""
    found = {}

    def visit(node: promql.Expr) -> None:
        if isinstance(node, promql.MatrixSelector):
            seconds = int(node.range.total_seconds())
            found[node.vector_selector.prettify()] = f"[{seconds}s]"
        elif isinstance(node, promql.VectorSelector):
            found.setdefault(node.prettify(), "")

    promql.walk(promql.parse(of_engine(expression)), visit)
    return found


def names(expression: str) -> set[str]:
    """Return the names of all series that an expression asks for."""
    found: set[str] = set()

    def visit(node: promql.Expr) -> None:
        if isinstance(node, promql.VectorSelector):
            found.add(node.name or "")

    promql.walk(promql.parse(of_engine(expression)), visit)
    return found


_RATES = {"rate", "irate", "increase"}
_SETS = {"and", "or", "unless"}


def _labels(node: promql.Expr, recording: Recorded, found: list[str]) -> set[str] | None:
    """Return the labels that the node's series can have, None for scalars; add what is missing."""
    match node:
        case promql.VectorSelector():
            return _selected(node, recording, found)
        case promql.MatrixSelector():
            return _selected(node.vector_selector, recording, found)
        case promql.AggregateExpr():
            return _aggregated(node, recording, found)
        case promql.BinaryExpr():
            return _joined(node, recording, found)
        case promql.Call():
            return _called(node, recording, found)
        case promql.ParenExpr() | promql.UnaryExpr() | promql.SubqueryExpr():
            return _labels(node.expr, recording, found)
    return None


def _selected(node: promql.VectorSelector, recording: Recorded, found: list[str]) -> set[str]:
    name = node.name or ""
    series = list(recording.named(name))
    if not series:
        found.append(f"{name}: there is no such series")
        return set()
    for matcher in node.matchers.matchers:
        if not any(_matches(each, matcher) for each in series):
            found.append(f"{name}: no series has {_written(matcher)}")
            return set()
    chosen = [each for each in series if all(_matches(each, one) for one in node.matchers.matchers)]
    if not chosen:
        found.append(f"{name}: no series has all of {node.prettify()}")
    return {label for each in chosen for label in each.labels}


def _matches(sample: Sample, matcher: promql.Matcher) -> bool:
    value = sample.labels.get(matcher.name, "")
    return value is None or matches(matcher, value)


def matches(matcher: promql.Matcher, value: str) -> bool:
    """Return whether a matcher takes a label's value, as Prometheus decides it."""
    match matcher.op:
        case promql.MatchOp.Equal:
            return value == matcher.value
        case promql.MatchOp.NotEqual:
            return value != matcher.value
        case promql.MatchOp.Re:
            return re.fullmatch(matcher.value, value) is not None
        case _:
            return re.fullmatch(matcher.value, value) is None


def _written(matcher: promql.Matcher) -> str:
    # Its operators are equal to themselves and have no hash.
    signs = (
        (promql.MatchOp.Equal, "="),
        (promql.MatchOp.NotEqual, "!="),
        (promql.MatchOp.Re, "=~"),
        (promql.MatchOp.NotRe, "!~"),
    )
    sign = next(sign for op, sign in signs if op == matcher.op)
    return f'{matcher.name}{sign}"{matcher.value}"'


def _aggregated(node: promql.AggregateExpr, recording: Recorded, found: list[str]) -> set[str]:
    inner = _labels(node.expr, recording, found) or set()
    if node.modifier is None:
        return set()
    labels = set(node.modifier.labels)
    if node.modifier.type == promql.AggModifierType.Without:
        return inner - labels
    if inner:
        found.extend(
            f"{node.expr.prettify()}: has no label {label}" for label in sorted(labels - inner)
        )
    return labels


def _joined(node: promql.BinaryExpr, recording: Recorded, found: list[str]) -> set[str] | None:
    left = _labels(node.lhs, recording, found)
    right = _labels(node.rhs, recording, found)
    if left is None or right is None:
        return right if left is None else left
    matching = node.modifier.matching if node.modifier else None
    on = (
        set(matching.labels)
        if matching and matching.type == promql.LabelModifierType.Include
        else None
    )
    for side, labels in ((node.lhs, left), (node.rhs, right)):
        if on is not None and labels:
            found.extend(
                f"{side.prettify()}: has no label {label}" for label in sorted(on - labels)
            )
    operator = str(node.op)
    if operator == "or":
        return left | right
    if operator in _SETS or on is None:
        return left
    taken = set(node.modifier.group_labels or ()) if node.modifier else set()
    many = node.modifier is not None and node.modifier.card != (
        promql.VectorMatchCardinality.OneToOne
    )
    return (left | taken) if many else left


def _called(node: promql.Call, recording: Recorded, found: list[str]) -> set[str] | None:
    name = node.func.name
    arguments = [_labels(each, recording, found) for each in node.args]
    if name in _RATES:
        for inner in node.args:
            series = inner.vector_selector.name if isinstance(inner, promql.MatrixSelector) else ""
            kind = recording.types.get(series or "", "counter")
            if kind not in {"counter", "histogram"}:
                found.append(f"{name}() of {series}, which is a {kind}")
    labels = next((each for each in arguments if each is not None), None)
    if name == "histogram_quantile" and labels is not None:
        if labels and "le" not in labels:
            found.append(f"{node.prettify()}: has no label le")
        return labels - {"le"}
    if name in {"label_replace", "label_join"}:
        (_, target, *_) = node.args
        return (labels or set()) | {target.val}
    if name == "vector":
        return set()
    if name == "absent":
        return {"job"}
    return labels

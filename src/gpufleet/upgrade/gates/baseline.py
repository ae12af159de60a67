"""Values that describe a service's behaviour: answers, counters, alerts.  Pure.

`on_node/serving/replica_answers.py` observes, `read_answers` parses its output, `gates.py` compares
two observations. The baseline is stored in the journal (`JsonValue`), so that a resumed upgrade
uses the same baseline.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias

from pydantic import BeforeValidator, FiniteFloat, PlainSerializer

from gpufleet.checks.finding import Report, Severity
from gpufleet.engines.engine import Measure, ResponseCounter, engines, line_beginnings
from gpufleet.engines.metrics_page import Samples, read_page
from gpufleet.formatting import join_names
from gpufleet.remote import payload
from gpufleet.settings.upgrade_settings import Golden
from gpufleet.upgrade.json_value import JsonValue

TTFT, ITL = "ttft", "itl"
LATENCIES = {TTFT: "time to first token", ITL: "time between tokens"}
_MEASURES = {TTFT: Measure.TTFT, ITL: Measure.ITL}
STARTED = "process_start_time_seconds"
# Paths of clients' requests. Probes, /metrics and other paths are not counted.
API = ("/v1/", "/v2/", "/rerank", "/score", "/classify", "/pooling")

# Limits: for one prompt, as in on_node/serving/endpoints.py; for all else that a node does.
PROMPT_SECONDS = 60
LOOK_SECONDS = 40


@dataclass(frozen=True)
class Answer(JsonValue):
    """One server's answer to a prompt, or why there is none."""

    text: str = ""
    tokens: tuple[int, ...] | None = None
    """Token ids in the model's vocabulary; None: the release does not return them."""
    error: str = ""
    asked: bool = True
    """False: the node reported no answer, so the server's state is unknown."""
    kind: str = "generate"
    """The kind of the model, from its unit."""
    numbers: tuple[FiniteFloat, ...] | None = None
    """An embedding vector, or the scores from which `text` was made; None: neither."""


Answers: TypeAlias = Mapping[str, tuple[Answer, ...]]
"""
Answers of all of a replica's servers, by prompt; several per server if the prompt was repeated.
"""


def answers_as_json(answers: Answers) -> dict[str, Any]:
    """Return plain values for `json.dumps`."""
    return {prompt: [each.as_json() for each in said] for prompt, said in answers.items()}


def answers_from_json(said: Mapping[str, Any]) -> dict[str, tuple[Answer, ...]]:
    """Parse the output of `answers_as_json`."""
    return {prompt: tuple(map(Answer.from_json, each)) for prompt, each in said.items()}


def _bounds_as_text(histogram: Mapping[float, float]) -> dict[str, float]:
    """Return a histogram with its bounds as Prometheus writes them: JSON has no infinity."""
    return {"+Inf" if math.isinf(at) else repr(at): count for at, count in histogram.items()}


Histogram: TypeAlias = Annotated[Mapping[float, float], PlainSerializer(_bounds_as_text)]
"""{upper bound: number of observations at or below it}; the last bound is infinite."""


@dataclass(frozen=True)
class Counters:
    """The counters of one server at one moment, since its start."""

    started: float | None = None
    """
    Start time of the server, in seconds since 1970; None: unknown (several API servers share their
    metrics).
    """
    latencies: Mapping[str, Histogram] = field(default_factory=dict, hash=False)
    """Histograms by `TTFT` and `ITL`; a metric that the release lacks is left out."""
    finished: Mapping[str, float] | None = field(default=None, hash=False)
    """Number of finished requests by finish reason; None: not reported."""
    answered: Mapping[str, float] | None = field(default=None, hash=False)
    """Number of API requests by HTTP status class: 2xx, 4xx, 5xx; None: not reported."""


@dataclass(frozen=True)
class Reading:
    """The counters of all servers of a replica at one moment."""

    at: float
    """Time of the reading, in seconds since 1970 by this machine's clock."""
    servers: Mapping[str, Counters | str] = field(hash=False)
    """
    Counters by server, "NODE URL". Unread counters are a sentence; if a node gave no answer, its
    name is the key.
    """


@dataclass(frozen=True)
class Traffic(JsonValue):
    """A replica's requests and latencies between two readings."""

    seconds: float
    latencies: Mapping[str, Histogram] = field(default_factory=dict, hash=False)
    finished: Mapping[str, float] | None = field(default=None, hash=False)
    answered: Mapping[str, float] | None = field(default=None, hash=False)
    restarted: tuple[str, ...] = ()
    """Servers that restarted between the readings."""
    unread: tuple[str, ...] = ()
    """A sentence for each server whose counters are unknown."""

    @property
    def requests(self) -> float:
        """Return the number of requests, counted by their times to first token."""
        return max(self.latencies.get(TTFT, {}).values(), default=0.0)


def _sorted_pairs(labels: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(labels.items()))


@dataclass(frozen=True)
class Alert(JsonValue):
    """A firing alert from an Alertmanager."""

    name: str
    node: str
    """Value of its label `instance`, the node's name; "": the alert is not about a node."""
    labels: Annotated[
        tuple[tuple[str, str], ...], BeforeValidator(_sorted_pairs), PlainSerializer(dict)
    ]
    """All labels, sorted. They identify the alert."""
    summary: str = ""
    since: str = ""
    """Start time of the alert (Alertmanager's `startsAt`), in ISO 8601."""


@dataclass(frozen=True)
class Alerts(JsonValue):
    """Firing alerts of all Alertmanagers. With all fields empty, no Alertmanager was queried."""

    asked: tuple[str, ...] = ()
    """The monitoring nodes to query; empty: none is declared."""
    alerts: tuple[Alert, ...] = ()
    problems: tuple[str, ...] = ()
    """A sentence for each monitoring node that did not answer."""
    at: float | None = None
    """The time of the earliest query, in seconds since 1970 by the monitoring nodes' clocks."""


@dataclass(frozen=True, order=True)
class StoppingFinding:
    """A finding of the node check that blocks, or a check without a result."""

    node: str
    check: str
    gpu: str
    """The GPU's UUID, or else its index; "": the whole node."""
    blocks: bool
    """False: the check could not be run."""
    found: str = ""

    @property
    def key(self) -> tuple[str, str, str, bool]:
        """Return the finding's identity: all fields except the sentence `found`."""
        return self.node, self.check, self.gpu, self.blocks


@dataclass(frozen=True)
class Findings(JsonValue):
    """The node check's findings about nodes."""

    nodes: tuple[str, ...] = ()
    """The checked nodes."""
    stops: tuple[StoppingFinding, ...] = ()

    @classmethod
    def unaccepted(cls, report: Report) -> Findings:
        """Return the findings of a report that are not accepted."""
        return cls(
            report.nodes,
            tuple(
                sorted(
                    StoppingFinding(
                        each.node,
                        each.check,
                        (each.gpu.uuid or each.gpu.name) if each.gpu else "",
                        each.severity >= Severity.BLOCK,
                        each.found,
                    )
                    for each in report.findings
                    if each.stops
                )
            ),
        )


# -- questions


@dataclass(frozen=True)
class Question:
    """The query about one replica."""

    replica: str
    nodes: tuple[str, ...]
    golden: Golden | None = None
    """Its golden prompts; None: only its counters are read."""
    times: int = 1
    """
    Number of times each prompt is sent: twice before a change, to see whether the answer is stable.
    """


def program(
    node: str, questions: Iterable[Question], alertmanager: str | None = None
) -> payload.Payload | None:
    """
    Return the query for a node's replicas and its Alertmanager; None: nothing to query.

    `alertmanager` is its address on the node: `http://127.0.0.1:9093`. The program is for
    `fleet.live.connect(...)`, with the deadline that `seconds` returns.
    """
    wanted = [
        {
            "replica": each.replica,
            "prompts": list(each.golden.prompts) if each.golden else [],
            **({"query": each.golden.query} if each.golden else {}),
            "max_tokens": each.golden.max_tokens if each.golden else 0,
            "times": each.times,
            "seconds": _seconds(each),
            # Repeat failed requests only before the change: without that answer nothing could be
            # compared later. After the change a missing answer is itself a result.
            "again": each.times > 1,
        }
        for each in questions
        if node in each.nodes
    ]
    if not wanted and alertmanager is None:
        return None
    measures = line_beginnings(*_MEASURES.values(), Measure.FINISHED)
    counters = [each.responses for each in engines()]
    families = [*measures, STARTED, *(name for each in counters for name in each.families)]
    return payload.program(
        "serving/replica_answers",
        replicas=wanted,
        families=families,
        alertmanager=alertmanager,
        seconds=PROMPT_SECONDS,
    )


def seconds(questions: Iterable[Question]) -> float:
    """
    Return the deadline of a node's observation in seconds: its replicas are queried in parallel.
    """
    return max((_seconds(each) for each in questions), default=LOOK_SECONDS) + LOOK_SECONDS


def _seconds(question: Question) -> float:
    # Today's models answer a prompt in well under a second. A hanging prompt may use its whole
    # deadline, and one more deadline is for slow prompts.
    prompts = len(question.golden.prompts) * question.times if question.golden else 0
    return LOOK_SECONDS + PROMPT_SECONDS * min(prompts, 2) + 5.0 * prompts


# -- answers


@dataclass(frozen=True)
class Observation:
    """Answers, counters and alerts from one observation."""

    answers: Mapping[str, Answers] = field(hash=False)
    """Answers by replica, then by prompt."""
    readings: Mapping[str, Reading] = field(hash=False)
    """Counters by replica."""
    alerts: Alerts = Alerts()


def read_answers(
    said: Mapping[str, Mapping[str, Any] | str],
    questions: Iterable[Question],
    now: float,
    homes: Collection[str] = (),
    ours: Collection[str] = (),
) -> Observation:
    """
    Parse nodes' answers to `program`; `said` is the result of `fleet.live.connect`.

    `homes` are the nodes with an Alertmanager to query. `ours` are the ids of this upgrade's own
    silences. An alert that only these silences mute still counts. An invalid answer raises no
    exception: its results are unknown, with the reason.
    """
    answers: dict[str, Answers] = {}
    readings: dict[str, Reading] = {}
    for question in questions:
        found: dict[str, list[Answer]] = defaultdict(list)
        servers: dict[str, Counters | str] = {}
        for node in question.nodes:
            try:
                _read_node(
                    node, said.get(node, "the node was not queried"), question, found, servers
                )
            except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as problem:
                why = f"the node's answer is invalid ({type(problem).__name__}: {problem})"
                _mark_unknown(node, why, question, found, servers)
        answers[question.replica] = {prompt: tuple(each) for prompt, each in found.items()}
        readings[question.replica] = Reading(now, servers)
    return Observation(answers, readings, _alerts(said, homes, ours))


def traffic_between(first: Reading | None, last: Reading) -> Traffic:
    """
    Return a replica's traffic between two readings; without `first`, since each server's start.

    The counters of a server that restarted in between began at 0, so their last values are the
    difference. A server that is only in the last reading also started in between.
    """
    latencies: dict[str, dict[float, float]] = {}
    finished: dict[str, float] | None = None
    answered: dict[str, float] | None = None
    restarted, unread = [], []
    for name, after in last.servers.items():
        before = first.servers.get(name) if first else None
        if isinstance(after, str) or isinstance(before, str):
            why = after if isinstance(after, str) else before
            unread.append(f"{name}: the server's counters are unknown: {why}")
            continue
        if before is not None and _has_restarted(before, after):
            restarted.append(name)
            before = None
        for key, histogram in after.latencies.items():
            was = before.latencies.get(key, {}) if before else {}
            summed = latencies.get(key)
            grown = {at: count - was.get(at, 0.0) for at, count in histogram.items()}
            latencies[key] = grown if summed is None else _sum_histograms(summed, grown)
        finished = _grow(finished, before.finished if before else None, after.finished)
        answered = _grow(answered, before.answered if before else None, after.answered)
    if not last.servers:
        unread.append("no server's counters could be read")
    if first:
        gone = sorted(set(first.servers) - set(last.servers))
        unread += (
            f"{name}: this server existed before the change and does not exist any more"
            for name in gone
        )
    return Traffic(
        last.at - first.at if first else 0.0,
        latencies,
        finished,
        answered,
        tuple(restarted),
        tuple(unread),
    )


def counters(text: str) -> Counters:
    """
    Parse a server's /metrics page. Raises `ValueError` for a page without any engine's metrics.

    The counters of all engines and models of the server are summed.
    """
    page = read_page(text)
    if page.engine is None:
        raise ValueError(
            f"the page has no metrics of {join_names(each.title for each in engines())}"
        )
    found = {key: page.measured(measure) for key, measure in _MEASURES.items()}
    started = [value for _, value in page.samples.get(STARTED, ())]
    return Counters(
        started[0] if len(started) == 1 else None,
        {key: _histogram(rows) for key, rows in found.items() if rows},
        _by_reason(page.measured(Measure.FINISHED)),
        _answered(page.engine.responses, page.samples),
    )


def _histogram(rows: Samples) -> dict[float, float]:
    """
    Return the sum of all series' buckets, by bound; all series of a server have the same bounds.
    """
    found: dict[float, float] = defaultdict(float)
    for labels, value in rows:
        found[float(labels["le"])] += value
    return dict(sorted(found.items()))


def _by_reason(rows: Samples) -> dict[str, float] | None:
    """Return finished requests by finish reason; None if the engine does not export reasons."""
    found: dict[str, float] = defaultdict(float)
    for labels, value in rows:
        if reason := labels.get("finished_reason"):
            found[reason] += value
    return dict(found) or None


def _answered(counter: ResponseCounter, series: Mapping[str, Samples]) -> dict[str, float] | None:
    """Return API requests by class of status, such as `5xx`; None if they are not counted."""
    found: dict[str, float] = defaultdict(float)
    for labels, value in series.get(counter.name, ()):
        is_request = labels.get("method", "POST") == "POST"  # no list of models
        if is_request and labels.get(counter.path, "").startswith(API):
            found[f"{labels.get(counter.status, '')[:1]}xx"] += value
    return dict(found) if counter.name in series or counter.instrumented in series else None


def _has_restarted(before: Counters, after: Counters) -> bool:
    """Return whether a server restarted: its start time changed, or a counter fell."""
    if before.started is not None and after.started is not None:
        # The time is exact to a hundredth of a second, the kernel's clock tick; less than a second
        # is no restart.
        return abs(after.started - before.started) > 1
    pairs = [
        *((before.latencies.get(key, {}), each) for key, each in after.latencies.items()),
        (before.finished or {}, after.finished or {}),
        (before.answered or {}, after.answered or {}),
    ]
    return any(was[key] > now.get(key, 0.0) for was, now in pairs for key in was)  # type: ignore[index,attr-defined]


def _grow(
    sum_: dict[str, float] | None,
    before: Mapping[str, float] | None,
    after: Mapping[str, float] | None,
) -> dict[str, float] | None:
    if after is None:
        return sum_
    found = dict(sum_ or {})
    for key, value in after.items():
        found[key] = found.get(key, 0.0) + value - (before or {}).get(key, 0.0)
    return found


def _sum_histograms(one: Histogram, other: Histogram) -> dict[float, float]:
    """Return the sum of two histograms at the bounds that both have."""
    return {at: count + other[at] for at, count in one.items() if at in other}


def _read_node(
    node: str,
    document: Mapping[str, Any] | str,
    question: Question,
    found: dict[str, list[Answer]],
    servers: dict[str, Counters | str],
) -> None:
    if isinstance(document, str):
        _mark_unknown(node, document, question, found, servers)
        return
    if document["schema"] != 1:
        raise ValueError(f"the schema is {document['schema']!r}, but must be 1")
    replica = document["replicas"][question.replica]
    if "missing" in replica:
        _mark_unknown(node, _reason(replica), question, found, servers)
        return
    for url, server in replica["servers"].items():
        name = f"{node} {url}"
        for prompt, answers in zip(
            question.golden.prompts if question.golden else (), server["golden"], strict=False
        ):
            found[prompt] += map(Answer.from_json, answers)
        metrics = server["metrics"]
        if "text" not in metrics:
            servers[name] = str(metrics.get("error", "no reason is known"))
            continue
        try:
            servers[name] = counters(metrics["text"])
        except (KeyError, ValueError) as problem:
            servers[name] = f"the server's /metrics page is invalid: {problem}"


def _mark_unknown(
    node: str,
    why: str,
    question: Question,
    found: dict[str, list[Answer]],
    servers: dict[str, Counters | str],
) -> None:
    servers[node] = why
    for prompt in question.golden.prompts if question.golden else ():
        found[prompt].append(Answer(error=f"{node}: {why}", asked=False))


def _reason(missing: Mapping[str, Any]) -> str:
    words = str(missing["missing"]).replace("_", " ")
    if "seconds" in missing:
        words += f" after {missing['seconds']:g} s"
    return f"{words} ({missing['detail']})" if missing.get("detail") else words


def _alerts(
    said: Mapping[str, Mapping[str, Any] | str], homes: Collection[str], ours: Collection[str]
) -> Alerts:
    alerts: dict[tuple[tuple[str, str], ...], Alert] = {}
    problems = []
    asked_at = []
    for home in sorted(homes):
        document = said.get(home, "the node was not queried")
        try:
            problem = document if isinstance(document, str) else document["alerts"]["error"]
            for each in (
                [] if problem or isinstance(document, str) else document["alerts"]["alerts"]
            ):
                if alert := _alert(each, ours):
                    alerts.setdefault(alert.labels, alert)
            if not problem and not isinstance(document, str):
                asked_at.append(float(document["alerts"]["at"]))
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            problem = f"the answer is invalid ({type(error).__name__}: {error})"
        if problem:
            problems.append(f"{home}: Alertmanager did not report its alerts: {problem}")
    return Alerts(
        tuple(sorted(homes)),
        tuple(alerts.values()),
        tuple(problems),
        min(asked_at, default=None),
    )


def _alert(each: Mapping[str, Any], ours: Collection[str]) -> Alert | None:
    """
    Parse an alert of Alertmanager's API; None: it is inhibited, or silenced by a silence not in
    `ours`.
    """
    status = each["status"]
    if status["inhibitedBy"] or set(status["silencedBy"]) - set(ours):
        return None
    labels = {str(key): str(value) for key, value in each["labels"].items()}
    return Alert(
        name=labels.get("alertname", ""),
        node=labels.get("instance", ""),
        labels=tuple(sorted(labels.items())),
        summary=str(each.get("annotations", {}).get("summary", "")),
        since=str(each.get("startsAt", "")),
    )

"""Judge whether a replica or a node is as good after a change as before. Pure.

Each gate compares two observations (`baseline.py`) and returns a `Verdict`. An unknown result is
not a pass, and only a person can accept it. If a gate cannot judge for a reason outside the change
(for example too few requests), the gate passes, and its reasons state this.
"""

from __future__ import annotations

import datetime as dt
import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, takewhile

from gpufleet.formatting import count_of
from gpufleet.settings.upgrade_settings import Gates
from gpufleet.upgrade.gates.baseline import (
    ITL,
    LATENCIES,
    Alerts,
    Answer,
    Answers,
    Findings,
    Histogram,
    Traffic,
)

QUANTILE = 0.99
_LEAST_SLOW = 2
"""
Minimum number of requests beyond the bucket after the baseline's p99 that shows a slowdown: a
single slow request is no evidence.
"""
_VECTORS = frozenset({"embed", "reward"})
"""Kinds of models with vectors of numbers as answers."""
_CHANGED = {
    "rerank": "has rank {} in the reranker's order, but it had rank {} before the change",
    "classify": "has the label {}, but it had the label {} before the change",
    "transcribe": "is transcribed as {}, but it was transcribed as {} before the change",
}
# Characters of a prompt or an answer that a message quotes.
_SHOWN = 40


@dataclass(frozen=True)
class Verdict:
    """The result of a gate, with its reasons."""

    passed: bool | None
    """None: unknown, which is not a pass."""
    reasons: tuple[str, ...] = ()
    """Sentences: why the gate failed; for a pass, which parts were not judged, and why."""
    seen: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Measured numbers for reports, for example `ttft_p99_before`, in seconds."""


class _Case:
    """A verdict under construction: failures, unknowns and remarks."""

    def __init__(self) -> None:
        self.against: list[str] = []
        self.unknown: list[str] = []
        self.remarks: list[str] = []
        self.seen: dict[str, float] = {}

    @property
    def verdict(self) -> Verdict:
        passed = False if self.against else None if self.unknown else True
        return Verdict(passed, (*self.against, *self.unknown, *self.remarks), self.seen)


def combine(verdicts: Iterable[Verdict]) -> Verdict:
    """
    Combine verdicts: a failure outweighs an unknown result, and an unknown result outweighs a pass.

    If verdicts have numbers of the same name, the last one is kept.
    """
    found = tuple(verdicts)
    said = {each.passed for each in found}
    passed = False if False in said else None if None in said else True
    ordered = sorted(found, key=lambda each: {False: 0, None: 1, True: 2}[each.passed])
    seen: dict[str, float] = {}
    for each in found:
        seen.update(each.seen)
    return Verdict(passed, tuple(reason for each in ordered for reason in each.reasons), seen)


# -- answers


def golden(before: Answers, after: Answers, same: float, cosine: float = 0.999) -> Verdict:
    """
    Judge the answers to golden prompts: at least the share `same` of the tokens must be the same,
    from the first token on.

    The cosine of embeddings before and after the change must be at least `cosine`. Labels, ranks of
    a reranker and transcribed words must be the same. A prompt without a stable answer before the
    change is reported and not judged; the other prompts decide. Without other prompts the result is
    unknown. With `same` 0 (for vectors `cosine` 0) any answer passes, except an empty one in place
    of text.
    """
    case = _Case()
    if not before and not after:
        case.remarks.append("no golden prompts are declared, so answers are not compared")
        return case.verdict
    shares = []
    loose = []
    for prompt in dict.fromkeys([*before, *after]):
        was, now = before.get(prompt, ()), after.get(prompt, ())
        name = _quoted(prompt)
        if not now:
            case.unknown.append(f"{name} was not tested after the change")
        elif failed := sorted({each.error for each in now if each.error and each.asked}):
            case.against.append(f"{name} got no answer: {'; '.join(failed)}")
        elif silent := sorted({each.error for each in now if each.error}):
            case.unknown.append(f"{name} could not be tested: {'; '.join(silent)}")
        elif (needed := cosine if now[0].kind in _VECTORS else same) == 0:
            _answers_at_all(case, name, was, now)
        elif why := _unfit(was, needed) or _other_kind(was, now):
            loose.append(f"{name} cannot be compared: {why}")
        else:
            share = min(_share(one, other) for one in was for other in now)
            shares.append(share)
            if share < needed:
                case.against.append(_different(name, share, needed, was, now))
    if shares:
        case.seen["golden_same"] = min(shares)
        case.remarks += loose
    else:
        case.unknown += loose
        if loose:
            case.unknown.append(
                "no golden prompt has a stable answer to compare: write prompts with stable "
                "answers, or `golden.same: 0`, which accepts any answer"
            )
    return case.verdict


def _answers_at_all(case: _Case, name: str, was: Sequence[Answer], now: Sequence[Answer]) -> None:
    spoke = any(_tokens(each) for each in was if not each.error)
    if spoke and not all(_tokens(each) for each in now):
        case.against.append(
            f"{name} has an empty answer, but its answer had text before the change"
        )


def _unfit(was: Sequence[Answer], same: float) -> str:
    """Return why the baseline answers cannot be compared; "": they can."""
    if not was:
        return "the prompt was not tested before the change"
    if failed := sorted({each.error for each in was if each.error}):
        return f"the prompt got no answer before the change either: {'; '.join(failed)}"
    if not any(_tokens(each) for each in was):
        return "the answer was already empty before the change"
    if len(was) < 2:
        return (
            "the prompt was tested only once before the change, so it is unknown whether the "
            "answer is stable"
        )
    share = min(_share(one, other) for one, other in combinations(was, 2))
    if share < same:
        return (
            f"the answers of {len(was)} tests before the change had only the first "
            f"{_percent(share)} in common, but {_percent(same)} is required"
        )
    return ""


def _share(one: Answer, other: Answer) -> float:
    """
    Return the length of the common beginning as a share of the longer answer.

    >>> _share(Answer(tokens=(1, 2, 3, 4)), Answer(tokens=(1, 2, 9, 4)))
    0.5

    For vectors it is the cosine; for kinds other than `generate`, 1 for equal texts and else 0.
    """
    if one.kind in _VECTORS:
        return _cosine(one.numbers or (), other.numbers or ())
    if one.kind != "generate":
        return float(one.text.split() == other.text.split())
    ours: Sequence[object]
    theirs: Sequence[object]
    if one.tokens is not None and other.tokens is not None:
        ours, theirs = one.tokens, other.tokens
    else:  # the release does not return tokens: compare characters
        ours, theirs = one.text, other.text
    longest = max(len(ours), len(theirs))
    pairs = zip(ours, theirs, strict=False)
    alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return alike / longest if longest else 1.0


def _cosine(one: Sequence[float], other: Sequence[float]) -> float:
    """
    Return the cosine of the angle between two vectors; 0 for vectors of different length.

    A single number has no direction: it is treated as the slope of a line.

    >>> _cosine((3.0, 4.0), (3.0, 4.0))
    1.0
    """
    if len(one) != len(other) or not one:
        return 0.0
    if len(one) == 1:
        one, other = (*one, 1.0), (*other, 1.0)
    lengths = math.hypot(*one) * math.hypot(*other)
    found = math.fsum(a * b for a, b in zip(one, other, strict=True)) / lengths if lengths else 0.0
    return min(1.0, found) if math.isfinite(found) else 0.0


def _other_kind(was: Sequence[Answer], now: Sequence[Answer]) -> str:
    """
    Return why answers of different kinds of models cannot be compared; "": the kinds are equal.
    """
    before, after = ({each.kind for each in answers} for answers in (was, now))
    if before == after and len(after) == 1:
        return ""
    names = (" and ".join(sorted(kinds)) for kinds in (before, after))
    return (
        "a model of kind {} answered the prompt before the change, and a model of kind {} "
        "answered it after the change"
    ).format(*names)


def _tokens(answer: Answer) -> int:
    if answer.kind in _VECTORS:
        return len(answer.numbers or ())
    if answer.kind == "transcribe":
        return 1  # a transcription may have no words
    return len(answer.text if answer.tokens is None else answer.tokens)


def _different(
    name: str, share: float, same: float, was: Sequence[Answer], now: Sequence[Answer]
) -> str:
    one, other = min(((one, other) for one in was for other in now), key=lambda pair: _share(*pair))
    if one.kind in _VECTORS:
        sizes = len(one.numbers or ()), len(other.numbers or ())
        if sizes[0] != sizes[1]:
            return (
                f"{name} returned an embedding of {sizes[1]} numbers, but returned {sizes[0]} "
                "numbers before the change"
            )
        cosine = math.floor(share * 1e6) / 1e6
        return (
            f"{name} returned a different embedding: its cosine with the embedding from before "
            f"the change is {cosine:g}, but at least {same:g} is required (`golden.cosine`)"
        )
    if one.kind in _CHANGED:
        return f"{name} {_CHANGED[one.kind].format(_quoted(other.text), _quoted(one.text))}"
    counted_in = "tokens" if one.tokens is not None and other.tokens is not None else "characters"
    lengths = ""
    if _tokens(one) != _tokens(other):
        lengths = f" ({_tokens(other)} {counted_in} instead of {_tokens(one)})"
    return (
        f"{name} got a different answer: only the first {_percent(share)} of the {counted_in} are "
        f"the same{lengths}, but {_percent(same)} are required. The answer was "
        f"{_quoted(one.text)} and is now {_quoted(other.text)}"
    )


def _quoted(text: str) -> str:
    line = " ".join(text.split())
    return f'"{line if len(line) <= _SHOWN else line[: _SHOWN - 3] + "..."}"'


def _percent(share: float) -> str:
    # Never rounded up: 99.97 % is not 100 %.
    return f"{math.floor(share * 1000) / 10:g} %"


# -- latencies and errors


def traffic(before: Traffic, after: Traffic, gates: Gates) -> Verdict:
    """
    Judge whether requests have the same latencies and errors as before.

    A p99 is only as exact as the histogram's buckets, so a p99 in the same bucket as before, or in
    the next bucket, passes. A single slow request also passes. If there were few requests or the
    replica has no baseline (`Traffic` with empty counters), the p99 is not judged, and the verdict
    states this. Errors are always judged.
    """
    case = _Case()
    is_new = not before.latencies and before.finished == before.answered == {} and not before.unread
    for name in after.restarted:
        case.against.append(f"{name}: the server restarted while it was observed")
    case.unknown += (f"after the change: {each}" for each in after.unread)
    case.unknown += (f"before the change: {each}" for each in before.unread)
    case.seen |= {"requests_before": before.requests, "requests_after": after.requests}
    # While counters are read, a few requests are counted twice or not at all.
    fewest = min(before.requests, after.requests)
    for key, words in LATENCIES.items():
        was, now = before.latencies.get(key), after.latencies.get(key)
        if was is None and is_new:
            case.remarks.append(
                f"{words}: gpufleet did not compare, because the model did not run before the "
                "change"
            )
        elif was is None or now is None:
            when = "before" if was is None else "after"
            case.unknown.append(f"{words}: no server reported this metric {when} the change")
        elif fewest < gates.latency_least_requests:
            case.remarks.append(
                f"{words}: gpufleet did not compare, because there were {before.requests:g} "
                f"requests before and {after.requests:g} after the change, but both numbers must "
                f"be at least {gates.latency_least_requests} (`gates.latency_least_requests`)"
            )
        else:
            _latency(case, key, was, now, gates.latency_ratio)
    _errors(case, before, after, gates.error_ratio)
    return case.verdict


def _latency(case: _Case, key: str, was: Histogram, now: Histogram, ratio: float) -> None:
    """Judge one p99 by the bucket bounds that both histograms have."""
    bounds = sorted(set(was) & set(now))
    one = quantile(QUANTILE, {at: was[at] for at in bounds})
    other = quantile(QUANTILE, {at: now[at] for at in bounds})
    words = LATENCIES[key]
    for when, value, histogram in (("before", one, was), ("after", other, now)):
        if not math.isnan(value):
            continue
        if key == ITL and not any(histogram.values()):
            # Requests of one token each have no time between tokens.
            case.remarks.append(
                f"{words}: gpufleet did not compare, because no answer {when} the change had two "
                "tokens or more"
            )
        else:
            case.unknown.append(f"{words}: the p99 {when} the change is unknown")
        return
    case.seen |= {f"{key}_p99_before": one, f"{key}_p99_after": other}
    next_one = _bucket(bounds, was) + 1
    slower = now[bounds[-1]] - now[bounds[min(next_one, len(bounds) - 1)]]
    # With fewer than a hundred requests, p99 is the slowest one, which may have any cause.
    if other > one * ratio and next_one < _bucket(bounds, now) and slower >= _LEAST_SLOW:
        case.against.append(
            f"{words}: the p99 is {_seconds(other)} and was {_seconds(one)} before the change. "
            f"That is {other / one:.1f} times as much, but at most {ratio:g} times as much is "
            "allowed (`gates.latency_ratio`)"
        )


def quantile(q: float, histogram: Histogram) -> float:
    """
    Return a quantile as Prometheus' `histogram_quantile(q, ...)` does; NaN without observations.

    Values are assumed to be evenly distributed within a bucket; beyond the last finite bound the
    result is that bound. Source: prometheus.io/docs, "histogram_quantile"; verified against
    promtool by a test.
    """
    bounds = sorted(histogram)
    counts = _rising([histogram[at] for at in bounds])
    if len(bounds) < 2 or not math.isinf(bounds[-1]) or counts[-1] <= 0:
        return math.nan
    rank = q * counts[-1]
    at = _first_with(counts, rank)
    if at == len(bounds) - 1:
        return bounds[-2]
    if at == 0 and bounds[0] <= 0:
        return bounds[0]
    start, below = (bounds[at - 1], counts[at - 1]) if at else (0.0, 0.0)
    return start + (bounds[at] - start) * (rank - below) / (counts[at] - below)


def _bucket(bounds: Sequence[float], histogram: Histogram) -> int:
    """Return the index, from 0, of the bucket that contains `QUANTILE`."""
    counts = _rising([histogram[at] for at in bounds])
    return _first_with(counts, QUANTILE * counts[-1])


def _first_with(counts: Sequence[float], rank: float) -> int:
    return min(bisect_left(counts, rank), len(counts) - 1)


def _rising(counts: Sequence[float]) -> list[float]:
    """
    Return the counts as a non-decreasing series: several series are not read at the same moment.
    """
    found: list[float] = []
    for count in counts:
        found.append(max(count, found[-1]) if found else count)
    return found


def _errors(case: _Case, before: Traffic, after: Traffic, ratio: float) -> None:
    """Judge both error counts of a release; at least one of them must exist."""
    rates = (
        ("requests that ended in an error", "finished", _error_rate),
        ("HTTP responses with a 5xx status", "answered", _server_error_rate),
    )
    judged = False
    for words, name, rate in rates:
        was, now = getattr(before, name), getattr(after, name)
        if now is None:
            continue
        judged = True
        one, other = rate(was or {}), rate(now)
        case.seen |= {f"{name}_errors_before": one, f"{name}_errors_after": other}
        if other > one + ratio:
            case.against.append(
                f"{words}: {_percent_up(other)} of {sum(now.values()):g} after the change, and "
                f"{_percent_up(one)} before the change. The increase is larger than "
                f"`gates.error_ratio` ({ratio:g}) allows"
            )
    if not judged:
        case.unknown.append("errors: no server reported how many of its requests failed")


def _error_rate(finished: Mapping[str, float]) -> float:
    return _part(finished.get("error", 0.0), finished)


def _server_error_rate(answered: Mapping[str, float]) -> float:
    return _part(answered.get("5xx", 0.0), answered)


def _part(some: float, of: Mapping[str, float]) -> float:
    return some / total if (total := sum(of.values())) > 0 else 0.0


def _percent_up(share: float) -> str:
    return f"{share * 100:.3g} %"


def _seconds(value: float) -> str:
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"


# -- findings and alerts


def findings(before: Findings, after: Findings) -> Verdict:
    """
    Judge the node check's findings: a problem that is new since the change fails the gate.

    Findings from before the change stay allowed. If a check ran before the change and could not run
    after it, the result is unknown.
    """
    case = _Case()
    known = {each.key for each in before.stops}
    blocked = {(each.node, each.check, each.gpu) for each in before.stops if each.blocks}
    for each in after.stops:
        if each.key in known or (not each.blocks and each.key[:3] in blocked):
            continue
        where = f"{each.node}{' GPU ' + each.gpu if each.gpu else ''}"
        (case.against if each.blocks else case.unknown).append(
            f"{where}: the check {each.check} {'fails' if each.blocks else 'could not be run'} "
            f"after the change, but not before the change: {each.found}"
        )
    if unchecked := sorted(set(before.nodes) - set(after.nodes)):
        case.unknown.append(f"no check ran after the change on {', '.join(unchecked)}")
    if not before.nodes and after.nodes:
        case.unknown.append(
            "no check ran before the change, so it is unknown which findings are older than the "
            "change"
        )
    old = len(known & {each.key for each in after.stops})
    if old:
        case.remarks.append(f"{count_of(old, 'finding')} from before the change are unchanged")
    return case.verdict


def alerts(
    before: Alerts, after: Alerts, nodes: Collection[str], holds: Mapping[str, float] | None = None
) -> Verdict:
    """
    Judge the alerts about `nodes`: an alert that is new since the change fails the gate.

    `holds` maps an alert's name to the seconds for which its condition holds before it fires. If
    the condition of an alert began before the first reading, the change did not cause the alert, so
    the alert is only noted. Without a monitoring node nothing is judged. If a declared Alertmanager
    does not answer before or after the change, the result is unknown.
    """
    case = _Case()
    if not after.asked:
        case.remarks.append("alerts: gpufleet did not compare, because no node has an Alertmanager")
        return case.verdict
    case.unknown += before.problems
    case.unknown += (each for each in after.problems if each not in before.problems)
    if missing := sorted(set(after.asked) - set(before.asked)):
        case.unknown.append(
            f"{', '.join(missing)}: this Alertmanager was not queried before the change"
        )
    old = {each.labels for each in before.alerts}
    for each in after.alerts:
        if each.node not in nodes or each.labels in old:
            continue
        what = f"{each.node}: the alert {each.name} fires, and did not fire before the change"
        said = f": {each.summary}" if each.summary else ""
        held = (holds or {}).get(each.name)
        began = _epoch(each.since) - held if held is not None else math.nan
        if before.at is not None and began < before.at:
            case.remarks.append(f"{what}, but its cause is older than the change{said}")
        else:
            case.against.append(what + said)
    return case.verdict


def never_passed(before: Alerts, rules: Gates) -> tuple[str, ...]:
    """Return, before any change, why no wave can pass the alert gate; (): a wave may pass."""
    if not rules.alerts or not before.problems:
        return ()
    return (
        *before.problems,
        "gpufleet changed nothing, because no wave could pass the alert gate and each wave would "
        "be rolled back. Make the Alertmanager reachable, or write `alerts: false` under "
        "`upgrade.gates`",
    )


def cannot_pass(
    answers: Answers, traffic_before: Traffic, rules: Gates, *, same: float, cosine: float
) -> tuple[str, ...]:
    """
    Return why a replica's gates cannot pass, whatever the change does; (): they may pass.

    The replica's baseline is compared with itself, as if nothing had changed.
    """
    case = _Case()
    loose = [
        f"{_quoted(prompt)} cannot be compared: {why}"
        for prompt, was in answers.items()
        if (needed := cosine if was and was[0].kind in _VECTORS else same)
        and (why := _unfit(was, needed))
    ]
    if len(loose) == len(answers):
        case.unknown += loose
    # Both readings are the same, so one sentence for each unread server is enough.
    again = replace(traffic_before, restarted=(), unread=())
    verdict = traffic(traffic_before, again, rules)
    return (*case.unknown, *(() if verdict.passed else verdict.reasons))


WITHOUT_BASELINE = "so the gates of the wave cannot pass: the wave will be changed and rolled back"
"""Message text: the consequence if `cannot_pass` returns reasons."""


def silent_replicas(silent: Mapping[str, str]) -> tuple[str, ...]:
    """Return a remark for each changed replica that does not answer before the change."""
    return tuple(
        f"{replica}: {why}. There are no earlier answers and no earlier counters of the replica, "
        f"{WITHOUT_BASELINE}. Repair the replica first with deploys/vllm.py and its present "
        "settings, or use deploys/vllm.py instead of an upgrade"
        for replica, why in sorted(silent.items())
    )


def _epoch(moment: str) -> float:
    """
    Return an ISO 8601 time in seconds since 1970; NaN for other texts, or without a UTC offset.
    """
    try:
        found = dt.datetime.fromisoformat(moment)
    except ValueError:
        return math.nan
    return found.timestamp() if found.tzinfo else math.nan

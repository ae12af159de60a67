"""Run levels of load on one target: requests, stop conditions, and the client's own cost.

Border: this module starts load clients, and reads the key and the certificate of the target.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

from gpufleet.errors import FleetError, file_fault
from gpufleet.formatting import count_of
from gpufleet.load_test.arrivals import Arrivals, ClosedLoop, Poisson, Trace
from gpufleet.load_test.client_ceiling import Ceiling, measure_ceiling
from gpufleet.load_test.client_places import ClientPlace, this_machine
from gpufleet.load_test.client_process import Beat, LevelRun, LoadSpec, run_level
from gpufleet.load_test.level import Level, LevelSummary
from gpufleet.load_test.load_target import Target
from gpufleet.load_test.media_work import PictureWork, SoundWork
from gpufleet.load_test.outcomes import Contract, Outcome
from gpufleet.load_test.pooled_work import PRESETS, PooledWork
from gpufleet.load_test.verdicts import is_kept
from gpufleet.load_test.workloads import TokenRange, Workload, fixed_length, text_work
from gpufleet.load_test.written_prompts import WrittenPrompts
from gpufleet.on_node.load.failure_reasons import WRONG

Made: TypeAlias = PooledWork | PictureWork | SoundWork
"""Workloads whose requests are not prompts of token ids."""
Work: TypeAlias = Workload | Made | WrittenPrompts

FEWEST_GIVE_UP_SECONDS = 30.0
GIVE_UP_TIMES = 10
"""The multiple of the longest objective at which a request is cut off as missed."""
MOST_CLIENT_SHARE = 0.5
"""
The maximum share of the clients' cores that may be busy.

Above it, due requests wait in the client.
"""
LATE_SECONDS, LATE_SHARE = 0.05, 0.05
"""A client was too slow if its p99 lag exceeds both 50 ms and 5 % of the TTFT objective."""
DRAIN_SECONDS = 2.0
"""
Seconds after a verdict for requests in flight.

They no longer count, but the server must be idle before the next level.
"""
_TRY_SECONDS = 120.0
ALONE_ERROR = 0.001
"""The chance of refusing, by single requests, a contract whose share is kept."""


class LevelObserver:
    """Receives the events of a load test; a subclass overrides the methods that it needs."""

    def began(self, load: float, /) -> None:
        """Called when a level begins, with its arrivals per second or concurrent requests."""

    def outcome(self, outcome: Outcome, /) -> None:
        """Called when a request of the level has ended."""

    def beat(self, beat: Beat, /) -> None:
        """Called when all requests due until `beat.now` have ended or are in flight."""

    def ended(self, run: LevelRun, /) -> None:
        """Called when the level has ended; its unfinished requests have no outcome."""


@dataclass
class LevelRuns:
    """Runs levels against one target, and collects their results."""

    target: Target
    contract: Contract
    work: Work
    ids: TokenRange
    seed: int
    processes: int
    trace: Trace | None = None
    """The trace that replaces random arrivals, or None."""
    place: ClientPlace = field(default_factory=this_machine)
    """The place of the clients."""
    most_in_flight: int | None = None
    """
    The limit of requests in flight of an open loop, or None.

    Further due requests wait in the clients.
    """
    stop_reason: Callable[[int], str] = lambda _in_flight: ""
    """A function of the number of requests in flight.

    A non-empty result ends the level and the search.
    """
    observers: Sequence[LevelObserver] = ()
    sleep: Callable[[float], None] = time.sleep
    """The function that waits for output of the load clients."""
    stopped: str = ""
    """The result of `stop_reason` that ended the last level; "" if none did."""
    lags: list[float] = field(default_factory=list)
    """The p99 lag of requests in seconds, for each level of an open loop."""
    costs: list[float] = field(default_factory=list)
    """CPU seconds per request, for each level."""

    def __post_init__(self) -> None:
        self._key = read_key(self.target.key_file)
        self._certificate = _read_certificate(self.target.ca_file)
        self._levels = 0

    def try_largest(self) -> float:
        """
        Send the largest request of the workload, and return its seconds to the whole answer.

        Raises `FleetError` without an answer, for example for a wrong key, a too short context, or
        a server that does not stream.
        """
        work = self.work
        if isinstance(work, Workload):
            whole = max(1, work.most_tokens - work.output.most - work.prefix_tokens)
            work = replace(
                work, input=fixed_length(whole), output=fixed_length(work.output.most), turns=1
            )
        elif not isinstance(work, WrittenPrompts):
            work = work.largest()
        found: list[Outcome] = []
        spec = self._spec(work, ClosedLoop(1), _TRY_SECONDS, _TRY_SECONDS)
        run_level(
            spec, 1, found.append, lambda _now, _due: bool(found),
            transport=self.place.transport, sleep=self.sleep,
        )  # fmt: skip
        error = found[0].error if found else "no answer"
        if error:
            place = f" from {self.place.name}" if self.place.is_node else ""
            raise FleetError(f"{self.target.url}{place}: {_explain(error, work)}")
        return found[0].e2e or 0.0

    def check_alone(self) -> None:
        """
        Send requests of the workload one at a time until one of them keeps the contract.

        Raises `FleetError` with the requests' latencies if enough of them miss the contract to
        prove that its share of requests cannot be reached.
        """
        most, give_up = fewest_alone(self.contract), give_up_seconds(self.contract)
        found: list[Outcome] = []

        def is_over(_now: float, _due: Sequence[float]) -> bool:
            return len(found) >= most or any(is_kept(each, self.contract) for each in found)

        spec = self._spec(self.work, ClosedLoop(1), most * give_up, give_up)
        run_level(spec, 1, found.append, is_over, transport=self.place.transport, sleep=self.sleep)
        if not any(is_kept(each, self.contract) for each in found):
            raise FleetError(_say_missed(self.target.model, self.contract, found))

    def run(self, load: float, budget_seconds: float, *, closed: bool = False) -> LevelSummary:
        """Run one level of load: arrivals per second, or the concurrency of a closed loop."""
        give_up = give_up_seconds(self.contract)
        rate, places = (None, round(load)) if closed else (load, None)
        level = Level(self.contract, rate, budget_seconds, give_up, concurrency=places)
        arrivals = self._arrivals(load) if places is None else ClosedLoop(places)
        spec = self._spec(self.work, arrivals, budget_seconds, give_up)

        def decide(now: float, in_flight: Sequence[float]) -> bool:
            self.stopped = self.stop_reason(len(in_flight))
            return level.decide(now, in_flight).action == "stop" or bool(self.stopped)

        def see(outcome: Outcome) -> None:
            level.add(outcome)
            for each in self.observers:
                each.outcome(outcome)

        def beat(found: Beat) -> None:
            for each in self.observers:
                each.beat(found)

        self.stopped = ""
        for each in self.observers:
            each.began(load)
        run = run_level(
            spec, self.processes, see, decide,
            on_beat=beat, transport=self.place.transport, sleep=self.sleep,
        )  # fmt: skip
        for each in self.observers:
            each.ended(run)
        if run.ended != "decided":
            level.decide(max(run.seconds, budget_seconds), run.unfinished)
        return self._checked(level, run)

    def _arrivals(self, rate: float) -> Arrivals:
        if self.trace:
            return replace(self.trace.at_rate(rate), concurrency=self.most_in_flight)
        return Poisson(rate, self.most_in_flight)

    def _checked(self, level: Level, run: LevelRun) -> LevelSummary:
        """Return a summary; *not known* if the level was stopped or the client too slow."""
        found = blame_client(level, run.lag_p99, self.contract)
        if found.rate is not None:
            self.lags.append(run.lag_p99)
        self.costs.append(run.cpu_seconds)
        if self.stopped:
            return replace(found, verdict="not known", why=self.stopped, ended="budget")
        return found

    def _spec(self, work: Work, arrivals: Arrivals, seconds: float, give_up: float) -> LoadSpec:
        self._levels += 1
        name = self.target.served_name
        if isinstance(work, Workload):
            header = self.target.session_header
            salt = secrets.token_hex(8)
            requests = work.requests(name, self.ids, salt, session_header=header)
        elif isinstance(work, WrittenPrompts):
            requests = work.requests(name)
        else:
            requests = work.requests(name, self.ids, secrets.token_hex(8))
        return LoadSpec(
            self.target.url,
            work.path,
            arrivals,
            requests,
            self.seed + self._levels,
            seconds,
            give_up,
            {"Authorization": f"Bearer {self._key}"} if self._key else {},
            self._certificate,
            DRAIN_SECONDS,
        )


def blame_client(level: Level, lag_p99: float, contract: Contract) -> LevelSummary:
    """
    Return a level's summary, as *not known* if the client may be why the level was missed.

    A late client only lengthens latencies, and by its lag at most. So a kept level stays kept, and
    a level that misses by more than the lag stays missed. In a closed loop, `lag_p99` is the delay
    of the client's loop.
    """
    found = level.summary()
    promised = contract.ttft_seconds or contract.e2e_seconds or 0.0
    on_time = lag_p99 <= max(LATE_SECONDS, LATE_SHARE * promised)
    if on_time or found.verdict != "missed" or level.is_missed_despite(lag_p99):
        return found
    return replace(
        found,
        verdict="not known",
        why=(
            f"the client sent its requests up to {lag_p99:.3f} s late (p99), so the client was "
            "the bottleneck: use more --processes, or a machine with more idle cores"
        ),
    )


def fewest_alone(contract: Contract) -> int:
    """
    Return the number of consecutive missed requests that prove that a share is not kept.

    >>> fewest_alone(Contract(share=0.95)), fewest_alone(Contract(share=0.5))
    (3, 10)
    """
    return math.ceil(math.log(ALONE_ERROR) / math.log(1 - contract.share))


def _say_missed(model: str, contract: Contract, found: Sequence[Outcome]) -> str:
    """Return a sentence on single requests that miss a contract, with their best latencies."""
    errors = sorted({each.error for each in found if each.error})
    said = [f"failures: {', '.join(errors)}"] if errors else []
    for name, limit in (
        ("ttft", contract.ttft_seconds),
        ("itl", contract.itl_seconds),
        ("e2e", contract.e2e_seconds),
    ):
        taken = [each for each in (getattr(one, name) for one in found) if each is not None]
        if limit is not None and taken:
            said.append(
                f"{name.upper()} is {min(taken):.3g} s at best, but the objective is {limit:g} s"
            )
    return (
        f"not even one request at a time meets the objectives of {model}: none of "
        f"{count_of(len(found), 'request')} met them ({'; '.join(said) or 'no answer'}). Raise "
        f"`serving.{model}.objectives`, or measure shorter requests with --lengths"
    )


def give_up_seconds(contract: Contract) -> float:
    """Return the seconds after which a request counts as failed."""
    longest = max(contract.ttft_seconds or 0.0, contract.e2e_seconds or 0.0)
    return max(FEWEST_GIVE_UP_SECONDS, GIVE_UP_TIMES * longest)


def too_old_seconds(contract: Contract) -> float:
    """Return the seconds after which an unfinished request counts as missed."""
    return min(give_up_seconds(contract), contract.e2e_seconds or math.inf)


def measure_client(work: Work, processes: int | None, place: ClientPlace) -> Ceiling:
    """Measure the clients' maximum rate at a place with a workload's requests."""
    like: Workload | Made
    if isinstance(work, Workload):
        prompt, tokens = round(work.mean_prompt_tokens), round(work.mean_tokens)
        like = text_work(max(1, prompt), max(1, tokens))
    elif isinstance(work, WrittenPrompts):
        like = PRESETS[work.kind][0] if work.kind in PRESETS else text_work(512, 128)
    else:
        like = work
    return measure_ceiling(
        processes or place.processes,
        like,
        cores=place.cores,
        transport=place.transport,
    )


_NO_WAY = "the clients' machine may be unable to reach the server: see `firewall.clients`"


def _explain(error: str, work: Work) -> str:
    """Return a sentence on a failed first request."""
    size = ""
    if isinstance(work, PictureWork | SoundWork):
        size = f" ({work.largest()})"
    elif not isinstance(work, WrittenPrompts):
        what = "prompt and answer" if isinstance(work, Workload) else "its longest text"
        size = f" ({work.most_tokens} tokens, {what})"
    hints = {
        "400": (
            "the model may not accept pictures, or the request may be longer than the model's "
            "context"
        )
        if isinstance(work, PictureWork)
        else "the request may be longer than the model's context: write shorter --lengths",
        "401": "the server does not accept the key: see --key-file, or `vllm.api_key_file`",
        WRONG: (
            "the answer is not valid for the model's kind (it may contain infinite numbers): see "
            "`gpufleet status --completion`"
        ),
        "403": "this client may not use the model: see `gateway.clients`",
        "404": "the server does not serve this model name: see `gpufleet status`",
        "429": "this client's requests are limited: see `gateway.clients`, `requests_per_minute`",
        "refused": _NO_WAY,
        "unreachable": _NO_WAY,
        "timeout": (
            f"the server did not answer within {_TRY_SECONDS:.0f} s. The server may hang, or "
            f"{_NO_WAY}"
        ),
    }
    return f"the first request{size} failed ({error})" + (
        f": {hints[error]}" if error in hints else ""
    )


def read_key(path: str | None) -> str:
    """Return the key in a file, or "" without a file. Raises `FleetError` with the file's name."""
    if path is None:
        return ""
    try:
        key = Path(path).read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise FleetError(f"{path}: gpufleet cannot read the key: {file_fault(error)}") from None
    if not key:
        raise FleetError(f"{path}: the file is empty: write the key into it")
    return key


def _read_certificate(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise FleetError(
            f"{path}: gpufleet cannot read the certificate: {file_fault(error)}"
        ) from None


def describe_work(work: Work) -> str:
    """Return a short description of a workload."""
    if isinstance(work, Workload):
        return f"{work.name}: {work.input} tokens in, {work.output} out" + (
            f", {work.turns} turns" if work.turns > 1 else ""
        )
    if isinstance(work, WrittenPrompts):
        return f"{work.name}: {count_of(len(work), 'prompt')}"
    return str(work)

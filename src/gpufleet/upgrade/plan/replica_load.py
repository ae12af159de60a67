"""The load of each replica, from its servers' /metrics.  Pure.

A server with several engines has one series for each engine. The requests of the engines are
summed. Their KV caches have the same size, so the use of the KV caches is averaged.

The limit of concurrent requests is `--max-num-seqs` for each engine. vLLM has no metric for this
number, so it is read from the unit's arguments. Without that argument it is computed as vLLM does.

`gpufleet measure` determines how many requests per second a replica carries within its objectives.
If that rate is known for the running replica, the finished requests are compared with the rate, and
the higher load counts, because users' requests may be longer than the requests of the measurement.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any, Literal

from gpufleet.artifacts.release import engine_version
from gpufleet.catalog.gpu_models import cuda_total_gib
from gpufleet.engines.engine import Measure
from gpufleet.engines.metrics_page import expected_name, read_page
from gpufleet.flags.normalize import human_readable
from gpufleet.formatting import join_names
from gpufleet.load_test.result import MeasuredRate
from gpufleet.node.topology import Node
from gpufleet.planning.stage import Running
from gpufleet.settings.engine_flags import DEFAULT, SLOT_FLAGS
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.sizing.startup_memory import batch_defaults
from gpufleet.versions import numbers

_NEEDED = (Measure.RUNNING, Measure.WAITING, Measure.KV_USE)
MEASURES = (*_NEEDED, Measure.FINISHED)

_FLAG = re.compile(r"^--(?P<name>[a-z0-9_-]+)[= ](?P<value>.*)$")


@dataclass(frozen=True)
class Sample:
    """The metrics of one server at one moment."""

    running: float
    waiting: float
    kv_usage: float
    """Usage of the KV cache from 0 to 1, the mean of its engines."""
    finished: float | None = None
    """Finished requests since its start; None: not reported."""


@dataclass(frozen=True)
class ReplicaLoad:
    """
    The load of a replica at its model's busiest moment.

    `running`, `waiting` and `kv_usage` are None if they are unknown; `unknown` then has the reason.
    """

    replica: str
    """Its id, for example `tiny-0`."""
    model: str
    node: str
    """The first of its nodes, by rank."""
    running: float | None
    """Requests that its engines process."""
    waiting: float | None
    """Requests in its engines' queues."""
    most_running: int | None
    """The limit of concurrent requests, over all its engines; None: unknown."""
    kv_usage: float | None
    """Usage of the KV cache from 0 to 1, the mean of its engines."""
    serves: bool = True
    """Whether it gets requests: it is up, and not drained."""
    unknown: str = ""
    """Why its load is unknown, or why it does not serve."""
    assumed: bool = False
    """Whether `most_running` is vLLM's default, not set by a flag."""
    finished_per_second: float | None = None
    """Finished requests per second during the observation; None: unknown."""
    carries_per_second: float | None = None
    """The measured rate that it carries; None: not measured with its present settings."""
    measured: str = ""
    """`MeasuredRate.age`; "": not measured with its present settings."""
    not_counted: str = ""
    """Why a measurement of its model does not apply; "": it applies, or there is none."""

    @property
    def share(self) -> float | None:
        """
        Return the replica's utilization: 1 is full, more is a queue; None: unknown.

        It is the highest of three values: the use of request slots, of the KV cache, and of the
        measured rate. If the slots are unknown and requests wait, the replica is full. A replica
        that does not serve has 0.
        """
        if not self.serves:
            return 0.0
        if self.running is None or self.waiting is None or self.kv_usage is None:
            return None
        slots = (
            float(bool(self.waiting))
            if self.most_running is None
            else (self.running + self.waiting) / self.most_running
        )
        return max(slots, self.kv_usage, self.measured_share or 0.0)

    @property
    def measured_share(self) -> float | None:
        """Return the share of its measured rate that its requests use; None: unknown."""
        if not self.carries_per_second or self.finished_per_second is None:
            return None
        return self.finished_per_second / self.carries_per_second

    @property
    def rests_on_measurement(self) -> bool:
        """Return whether `share` is that of the measured rate, not of slots or KV cache."""
        return bool(self.measured_share) and self.measured_share == self.share

    def as_json(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`."""
        return {**asdict(self), "share": self.share}


def read(text: str) -> Sample | str:
    """Parse a page of /metrics; return a sentence if an engine's metrics are missing or invalid."""
    try:
        page = read_page(text)
    except ValueError as error:
        return f"the server's metrics cannot be read: {error}"
    found = {measure: page.values(measure) for measure in _NEEDED}
    ended = page.values(Measure.FINISHED)
    if missing := [expected_name(each, page) for each, values in found.items() if not values]:
        return f"the server's metrics have no {join_names(missing)}"
    if wrong := [n for n, values in found.items() for v in values if not math.isfinite(v) or v < 0]:
        return f"the value of {expected_name(wrong[0], page)} is not a number"
    return Sample(
        sum(found[Measure.RUNNING]),
        sum(found[Measure.WAITING]),
        fmean(found[Measure.KV_USE]),
        sum(ended) if ended and math.isfinite(sum(ended)) else None,
    )


def loads(
    running: Iterable[Running],
    pages: Mapping[tuple[str, int], tuple[str, ...] | str],
    nodes: Mapping[str, Node],
    settings: Mapping[str, NodeSettings],
    *,
    out: Mapping[str, str] | None = None,
    carries: Mapping[str, MeasuredRate | str] | None = None,
    seconds: float | None = None,
) -> tuple[ReplicaLoad, ...]:
    """
    Return the load of each replica that has units, by model and number.

    `pages` has for each server, by (node, port) as in `Running.servers`, several pages of /metrics
    over some seconds, at the same times for all servers; or a sentence why there are none. The
    moment of the model's highest load counts. `nodes` and `settings` determine vLLM's defaults on a
    node. `out` is {replica's id: why} for replicas without requests: drained by a person, failed,
    still starting. `carries` is {replica's id: its measured rate, or why its model's measurements
    do not apply}, `seconds` the time from the first to the last page.
    """
    replicas: dict[tuple[str, int], list[Running]] = {}
    for each in sorted(running, key=lambda each: (each.model, each.replica, each.rank, each.node)):
        replicas.setdefault((each.model, each.replica), []).append(each)
    found: dict[str, list[tuple[ReplicaLoad, list[Sample]]]] = {}
    for (model, _), stages in replicas.items():
        slots, assumed = most_running(stages, nodes, settings)
        why = (out or {}).get(stages[0].id, "")
        samples = [] if why else _samples(stages, pages)
        unknown = why or (samples if isinstance(samples, str) else "")
        listed = [] if isinstance(samples, str) else samples
        known = (carries or {}).get(stages[0].id, "")
        rate = None if isinstance(known, str) else known
        load = ReplicaLoad(
            replica=stages[0].id,
            model=model,
            node=stages[0].node,
            running=None,
            waiting=None,
            most_running=slots,
            kv_usage=None,
            serves=not why,
            unknown=unknown,
            assumed=assumed,
            finished_per_second=_finished_per_second(listed, seconds),
            carries_per_second=rate.requests_per_second if rate else None,
            measured=rate.age if rate else "",
            not_counted=known if isinstance(known, str) else "",
        )
        found.setdefault(model, []).append((load, listed))
    return tuple(load for each in found.values() for load in _busiest(each))


def most_running(
    stages: Sequence[Running], nodes: Mapping[str, Node], settings: Mapping[str, NodeSettings]
) -> tuple[int | None, bool]:
    """
    Return the limit of concurrent requests over all engines of a replica, and whether that is a
    default. None: unknown, because its units do not show their command, release or hardware.
    """
    first = stages[0]
    flags = {
        found["name"].replace("_", "-"): found["value"]
        for line in first.arguments
        if (found := _FLAG.match(line.strip()))
    }
    if not first.arguments:
        return None, False
    engines = _number(flags, "data-parallel-size") or 1
    engine, version = engine_version(first.release)
    if (given := _number(flags, SLOT_FLAGS.get(engine, ""))) is not None:
        return (given * engines, False) if given > 0 else (None, False)
    here, node = settings.get(first.node), nodes.get(first.node)
    if here is None or engine != DEFAULT or not re.match(r"\d+\.\d+", version):
        return None, False
    device: Literal["cuda", "cpu"] = (
        "cpu" if here.servers and here.servers.device == "cpu" else "cuda"
    )
    used = [gpu for gpu in node.gpus if gpu.uuid in first.gpu_uuids] if node else []
    if device == "cuda" and not used:
        return None, False
    world = (_number(flags, "tensor-parallel-size") or 1) * (
        _number(flags, "pipeline-parallel-size") or 1
    )
    taken = batch_defaults(
        vllm=numbers(version),
        gpu_memory_gib=min(
            (cuda_total_gib(gpu.name, gpu.memory_mib << 20) for gpu in used), default=0.0
        ),
        # Whatever the model's context, the token limit allows at least that many sequences.
        max_model_len=1 << 20,
        world=world,
        compute_capability=used[0].compute_capability if used else None,
        gpu=used[0].name if used else None,
        device=device,
        max_num_batched_tokens=_number(flags, "max-num-batched-tokens"),
        throughput=flags.get("performance-mode") == "throughput",
    )
    return taken.max_num_seqs * engines, True


def remarks(found: Iterable[ReplicaLoad]) -> tuple[str, ...]:
    """
    Return sentences on replicas that do not serve, and on loads that are uncertain or measured.
    """
    assumed: dict[tuple[str, int], list[str]] = {}
    blind: dict[str, list[str]] = {}
    idle: list[str] = []
    measured: list[str] = []
    void: dict[str, list[str]] = {}
    for each in found:
        if each.serves and each.not_counted:
            void.setdefault(each.not_counted, []).append(each.replica)
        if each.serves and each.measured_share is not None:
            measured.append(
                f"{each.replica} finishes {each.finished_per_second:.3g} requests/s at present. "
                f"The capacity of a replica is {each.carries_per_second:.3g} requests/s, measured "
                f"{each.measured}"
            )
        if not each.serves:
            idle.append(f"{each.replica} on {each.node} does not serve: {each.unknown}")
        elif each.most_running is None:
            blind.setdefault(each.model, []).append(each.replica)
        elif each.assumed:
            assumed.setdefault((each.model, each.most_running), []).append(each.replica)
    said = [
        f"{join_names(names)}: each replica runs at most {slots} concurrent requests, which is "
        f"vLLM's default. Set `serving.{model}.flags.max-num-seqs` to change this limit"
        for (model, slots), names in assumed.items()
    ]
    said += [
        f"{join_names(names)}: the limit of concurrent requests is unknown, so gpufleet computes "
        "the load only from the KV cache and the queue: set "
        f"`serving.{model}.flags.max-num-seqs`"
        for model, names in blind.items()
    ]
    measured += [
        f"{join_names(names)}: gpufleet does not use a measured rate: {why}"
        for why, names in void.items()
    ]
    return (*idle, *measured, *said)


def _samples(
    stages: Sequence[Running], pages: Mapping[tuple[str, int], tuple[str, ...] | str]
) -> list[Sample] | str:
    """
    Return a replica's samples, one for each moment, or a sentence why they are unknown.

    Requests are summed and KV usage is averaged over its servers. If servers have different numbers
    of pages, their peaks count.
    """
    servers = [(each.node, port) for each in stages for port in each.servers]
    if not servers:
        return "the units of the replica contain no port"
    of_each: list[list[Sample]] = []
    for node, port in servers:
        texts = pages.get((node, port), "the server's metrics were not queried")
        if isinstance(texts, str) or not texts:
            return f"{node}:{port}: {texts or 'the server returned no metrics'}"
        samples = [read(text) for text in texts]
        if wrong := [each for each in samples if isinstance(each, str)]:
            return f"{node}:{port}: {wrong[0]}"
        of_each.append([each for each in samples if not isinstance(each, str)])
    if len({len(each) for each in of_each}) > 1:
        of_each = [[_peak(each)] for each in of_each]
    return [
        Sample(
            sum(each.running for each in moment),
            sum(each.waiting for each in moment),
            fmean(each.kv_usage for each in moment),
            _sum_or_none([each.finished for each in moment]),
        )
        for moment in zip(*of_each, strict=True)
    ]


def _finished_per_second(samples: Sequence[Sample], seconds: float | None) -> float | None:
    """
    Return the finished requests per second; None: unknown, or a server was started in between.
    """
    if len(samples) < 2 or not seconds:
        return None
    first, last = samples[0].finished, samples[-1].finished
    return None if first is None or last is None or last < first else (last - first) / seconds


def _sum_or_none(values: Sequence[float | None]) -> float | None:
    known = [each for each in values if each is not None]
    return sum(known) if len(known) == len(values) else None


def _busiest(found: Sequence[tuple[ReplicaLoad, list[Sample]]]) -> list[ReplicaLoad]:
    """Return the loads of a model's replicas at its busiest moment."""
    moments = {len(samples) for _, samples in found if samples}
    if len(moments) > 1:  # different moments: use each replica's own busiest one
        found = [(load, [_peak(samples)] if samples else []) for load, samples in found]
        moments = {1}
    at = [
        [_with(load, samples[moment]) if samples else load for load, samples in found]
        for moment in range(moments.pop() if moments else 0)
    ]
    if not at:
        return [load for load, _ in found]
    return max(at, key=lambda loads: sum(each.share or 0.0 for each in loads))


def _with(load: ReplicaLoad, sample: Sample) -> ReplicaLoad:
    return replace(load, running=sample.running, waiting=sample.waiting, kv_usage=sample.kv_usage)


def _peak(samples: Sequence[Sample]) -> Sample:
    """Return the maximum of each number over all moments."""
    return Sample(
        max(each.running for each in samples),
        max(each.waiting for each in samples),
        max(each.kv_usage for each in samples),
    )


def _number(flags: Mapping[str, str], name: str) -> int | None:
    return human_readable(flags[name].strip("'\"")) if name in flags else None

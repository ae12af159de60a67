"""The interface of an engine, and the list of all engines. Pure.

An engine is a folder beside this file whose package has an `ENGINE`. Its command line and variables
become a stage's unit (serving/unit.py). Waves, gates, drains, load tests and the doctor read a
server's /metrics by `Measure` (metrics_page.py), without the engine's name: the prefix of a page's
metrics identifies the engine.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from pathlib import Path

from gpufleet import engines as room
from gpufleet.flags.problem import Problem
from gpufleet.flags.schema import Schema
from gpufleet.planning.multinode.launch import Rank
from gpufleet.planning.stage import Stage
from gpufleet.settings.base import KeyPath
from gpufleet.settings.engine_flags import DEFAULT
from gpufleet.settings.serving_settings import EngineSettings, Served


class Measure(StrEnum):
    """A metric of a server's work; the value says what it counts or measures."""

    RUNNING = "running requests"
    """Gauge."""
    WAITING = "waiting requests"
    """Gauge."""
    KV_USE = "KV cache usage"
    """Gauge, from 0 to 1."""
    PREEMPTED = "preempted requests"
    """Counter of requests whose KV cache blocks were taken by other requests."""
    FINISHED = "finished requests"
    """Counter; with the label `finished_reason` if the engine exports it."""
    PROMPT_TOKENS = "tokens of a prompt"
    """Histogram over requests."""
    TTFT = "time to first token"
    """Histogram, seconds."""
    ITL = "time between tokens"
    """Histogram, seconds; one observation for each pause between two outputs."""
    E2E = "time of a whole request"
    """Histogram, seconds."""
    QUEUE_TIME = "time in the queue"
    """Histogram over requests, seconds."""
    GENERATED_TOKENS = "generated tokens of a request"
    """Histogram over requests."""
    PROGRESS = "work on requests that are still running"
    """Counter that grows while a request runs, not only when it ends."""
    WAITING_BY_REASON = "waiting requests by reason"
    """Gauge, by the label `reason`; without it, of requests that wait for room."""
    REJECTED = "requests turned away"
    """Counter of requests that the server rejected because its queue was full."""
    PROMPT_TOKENS_TOTAL = "prompt tokens"
    """Counter."""
    GENERATED = "generated tokens"
    """Counter."""
    PREFIX_QUERIES = "tokens that were looked up in the prefix cache"
    """Counter."""
    PREFIX_HITS = "tokens that the prefix cache had"
    """Counter."""


HISTOGRAMS = frozenset(
    {
        Measure.PROMPT_TOKENS,
        Measure.TTFT,
        Measure.ITL,
        Measure.E2E,
        Measure.QUEUE_TIME,
        Measure.GENERATED_TOKENS,
    }
)


@dataclass(frozen=True)
class ProgressMetrics:
    """
    The metrics from which the watchdog detects a server's progress.

    Attributes:
        marks: metrics whose change is progress. Each release has some of them.
        work: the gauges in `marks` that count running or waiting requests.
        engine_label: the label that identifies an engine of a server with several; "" if a server
            has only one.
        deferred: metric, label and value of a gauge of requests that do not wait for the engine;
            they do not count as work. None if the engine has no such gauge.
        awake: metric, label and value of a gauge that is 0 while the engine sleeps. None if the
            engine cannot sleep.
    """

    marks: tuple[str, ...]
    work: tuple[str, ...]
    engine_label: str
    deferred: tuple[str, str, str] | None = None
    awake: tuple[str, str, str] | None = None


@dataclass(frozen=True)
class ResponseCounter:
    """
    The counter of a server's HTTP responses.

    Attributes:
        name: the metric. It has no series of a path and status before their first response.
        path: the label of the path.
        status: the label of the status, such as `503`, or of its class, such as `5xx`.
        instrumented: a metric that a server which counts responses has from its start.
    """

    name: str
    path: str
    status: str
    instrumented: str

    @property
    def families(self) -> tuple[str, str]:
        """The beginnings of the lines of a server's page that are read."""
        return f"{self.name}{{", self.instrumented


@dataclass(frozen=True)
class Launcher:
    """
    The program that starts a server with its keys, on nodes.

    Attributes:
        path: its path on nodes.
        content: its file, for the folder of templates; a change restarts the engine's servers.
        words: the words before the server's program, for the folder of a release.
        of_ranks: whether it starts the rank's program of a multi-node replica; otherwise the rank's
            program starts it.
    """

    path: str
    content: Callable[[Path], bytes]
    words: Callable[[str], tuple[str, ...]]
    of_ranks: bool = False


@dataclass(frozen=True)
class FlagRules:
    """
    The flags of an engine's releases.

    Attributes:
        versions: the releases whose schemas are in the package, oldest first.
        load: the schema of such a release.
        check: the problems of a server's arguments and variables.
    """

    versions: Callable[[], tuple[str, ...]]
    load: Callable[[str], Schema]
    check: Callable[[Schema, Sequence[str], Mapping[str, str]], tuple[Problem, ...]]


@dataclass(frozen=True)
class Engine:
    """
    An engine that serves models.

    Attributes:
        name: the name in settings.
        title: the name in messages.
        prefix: the prefix of the names of all its own metrics.
        metrics: metric names by measure, the newest name first, a histogram's without `_bucket`.
            Measures that the engine does not export are missing.
        responses: the counter of HTTP responses.
        progress: the metrics that the watchdog reads.
        program: the command that starts a server, relative to the folder of a release.
        launcher: the program that runs it.
        flags: the rules of its flags.
        arguments: a stage's arguments in groups of one line each, a flag and its values, with the
            path of the setting that each comes from: `("serving", "llama", "port")`. Raises
            `FleetError` for values that no process can receive.
        environment: the variables of a stage's process, for the id of its release and the node's
            `cuda.toolkit`. Raises `FleetError` with every name and value that is invalid, and
            every name that the plan sets.
        replica_variables: the variables that all ranks of a replica share, whatever their GPUs.
        rank: the additional launch arguments of a rank of a multi-node replica.
    """

    name: str
    title: str
    prefix: str
    metrics: Mapping[Measure, tuple[str, ...]]
    responses: ResponseCounter
    progress: ProgressMetrics
    program: str
    launcher: Launcher
    flags: FlagRules
    arguments: Callable[[Stage, Served, EngineSettings], list[tuple[KeyPath, tuple[str, ...]]]]
    environment: Callable[[Stage, Served, EngineSettings, str, str | None], dict[str, str]]
    replica_variables: Callable[[Served], dict[str, str]]
    rank: Callable[[Stage, Served, EngineSettings], Rank]

    def series(self, measure: Measure) -> tuple[str, ...]:
        """Return the names of a measure's samples; for a histogram, the names of its buckets."""
        suffix = "_bucket" if measure in HISTOGRAMS else ""
        return tuple(name + suffix for name in self.metrics.get(measure, ()))


def engines() -> tuple[Engine, ...]:
    """
    Return all engines that can serve models, by name.

    A folder without an `ENGINE` has flag schemas only.
    """
    found = sorted(each.name for each in pkgutil.iter_modules(room.__path__) if each.ispkg)
    modules = [import_module(f"{room.__name__}.{name}") for name in found]
    return tuple(module.ENGINE for module in modules if hasattr(module, "ENGINE"))


def engine(name: str = DEFAULT) -> Engine:
    """Return an engine by its name."""
    return next(each for each in engines() if each.name == name)


def line_beginnings(*measures: Measure) -> tuple[str, ...]:
    """Return the prefixes of the lines of these measures on any engine's page.

    A prefix ends with the brace of the labels, because a longer name is another metric.
    """
    return tuple(
        f"{name}{{" for each in engines() for measure in measures for name in each.series(measure)
    )

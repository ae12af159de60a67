"""The interface of an engine, and the list of all engines. Pure.

An engine is a package in a folder beside this file that has an `ENGINE`. The engine's command line
and variables become a part of a stage's systemd unit (serving/unit.py). Waves, gates, drains, load
tests and the doctor read values on a server's /metrics page by `Measure` (metrics_page.py). They do
not need the engine's name, because the prefix of the metrics identifies the engine.
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
    """A metric of a server's work. The value describes what the metric counts or measures."""

    RUNNING = "running requests"
    """Gauge."""
    WAITING = "waiting requests"
    """Gauge."""
    KV_USE = "KV cache usage"
    """Gauge, from 0 to 1."""
    PREEMPTED = "preempted requests"
    """Counter of requests whose KV cache blocks the engine gave to other requests."""
    FINISHED = "finished requests"
    """Counter. It has the label `finished_reason` if the engine exports this label."""
    PROMPT_TOKENS = "tokens of a prompt"
    """Histogram over requests."""
    TTFT = "time to first token"
    """Histogram, seconds."""
    ITL = "time between tokens"
    """Histogram in seconds, with one observation for each pause between two outputs."""
    E2E = "time of a whole request"
    """Histogram, seconds."""
    QUEUE_TIME = "time in the queue"
    """Histogram over requests, seconds."""
    GENERATED_TOKENS = "generated tokens of a request"
    """Histogram over requests."""
    PROGRESS = "work on requests that are still running"
    """Counter that increases while a request runs, and not only when the request ends."""
    WAITING_BY_REASON = "waiting requests by reason"
    """
    Gauge with the label `reason`.

    A series without this label counts requests that wait for free capacity.
    """
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
        marks: the metrics whose change shows progress. Each release has some of these metrics.
        work: those gauges in `marks` that count running or waiting requests.
        engine_label: the label that identifies an engine if a server has several engines. "": a
            server has only one engine.
        deferred: the metric, the label and the label's value of a gauge. It counts requests that
            wait for something other than the engine, so they do not count as work. None: the engine
            has no such gauge.
        awake: the metric, the label and the label's value of a gauge that is 0 while the engine
            sleeps. None: the engine cannot sleep.
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
        name: the metric. A series for a path and status exists only after the first such response.
        path: the name of the label with the path.
        status: the name of the label with the status, such as `503`, or with the class of the
            status, such as `5xx`.
        instrumented: a metric that exists from the start of a server if the server counts
            responses.
    """

    name: str
    path: str
    status: str
    instrumented: str

    @property
    def families(self) -> tuple[str, str]:
        """The beginnings of the lines that are read from a server's /metrics page."""
        return f"{self.name}{{", self.instrumented


@dataclass(frozen=True)
class Launcher:
    """
    The program on nodes that starts a server with its API keys.

    Attributes:
        path: the program's path on nodes.
        content: returns the program's file for the folder of templates. If the file changes, the
            engine's servers are restarted.
        words: returns the words before the server's program on the command line, for the folder of
            a release.
        of_ranks: for multi-node replicas, whether the launcher starts the rank's program. False:
            the rank's program starts the launcher.
    """

    path: str
    content: Callable[[Path], bytes]
    words: Callable[[str], tuple[str, ...]]
    of_ranks: bool = False


@dataclass(frozen=True)
class FlagRules:
    """
    The rules for the flags of an engine's releases.

    Attributes:
        versions: returns the releases whose flag schemas are in gpufleet's package, the oldest
            first.
        load: returns the flag schema of such a release.
        check: returns the problems of a server's arguments and variables.
    """

    versions: Callable[[], tuple[str, ...]]
    load: Callable[[str], Schema]
    check: Callable[[Schema, Sequence[str], Mapping[str, str]], tuple[Problem, ...]]


@dataclass(frozen=True)
class Engine:
    """
    An engine that serves models.

    Attributes:
        name: the engine's name in settings.
        title: the engine's name in messages.
        prefix: the prefix of the names of all metrics of the engine itself.
        metrics: maps each measure to its metric names, the newest name first. The name of a
            histogram has no `_bucket`. Measures that the engine does not export are missing.
        responses: the counter of HTTP responses.
        progress: the metrics that the watchdog reads.
        program: the command that starts a server, relative to the folder of a release.
        launcher: the program that runs `program`.
        flags: the rules for the engine's flags.
        arguments: returns a stage's arguments in groups. Each group is a flag with its values, and
            becomes one line of the unit. Each group has the path of its setting, such as
            `("serving", "llama", "port")`. Raises `FleetError` for values that cannot be passed to
            a process.
        environment: returns the variables of a stage's process. The last two parameters are the id
            of the stage's release and the node's `cuda.toolkit`. Raises `FleetError` with every
            invalid name and value in the settings, and with every name that only the plan may set.
        replica_variables: returns the variables that are the same for all ranks of a replica,
            whatever their GPUs.
        rank: returns the additional launch arguments of a rank of a multi-node replica.
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
        """
        Return the names of a measure's samples.

        For a histogram, these are the names of its buckets.
        """
        suffix = "_bucket" if measure in HISTOGRAMS else ""
        return tuple(name + suffix for name in self.metrics.get(measure, ()))


def engines() -> tuple[Engine, ...]:
    """
    Return all engines that can serve models, sorted by name.

    A folder without an `ENGINE` only has flag schemas.
    """
    found = sorted(each.name for each in pkgutil.iter_modules(room.__path__) if each.ispkg)
    modules = [import_module(f"{room.__name__}.{name}") for name in found]
    return tuple(module.ENGINE for module in modules if hasattr(module, "ENGINE"))


def engine(name: str = DEFAULT) -> Engine:
    """Return an engine by its name."""
    return next(each for each in engines() if each.name == name)


def line_beginnings(*measures: Measure) -> tuple[str, ...]:
    """Return the beginnings of the lines with these measures on the /metrics page of any engine.

    Each beginning ends with the brace before the labels, because a longer name is a different
    metric.
    """
    return tuple(
        f"{name}{{" for each in engines() for measure in measures for name in each.series(measure)
    )

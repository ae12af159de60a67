"""The interface of an engine, and the engines that there are.  Pure.

An engine is a folder beside this file whose package has an `ENGINE`. Its command line and variables
become a stage's unit (serving/unit.py). Waves, gates, drains, load
tests and the doctor read a server's /metrics by `Measure` (metrics_page.py), and need no engine's
name: a page says by its prefix whose it is.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module

from gpufleet import engines as room
from gpufleet.planning.multinode.launch import Rank
from gpufleet.planning.stage import Stage
from gpufleet.settings.base import KeyPath
from gpufleet.settings.serving_settings import Served, Vllm

DEFAULT = "vllm"
"""The engine of models that name none."""


class Measure(StrEnum):
    """A metric of a server's work; the value is its name in sentences."""

    RUNNING = "running requests"
    """Gauge."""
    WAITING = "waiting requests"
    """Gauge."""
    KV_USE = "KV cache usage"
    """Gauge, from 0 to 1."""
    PREEMPTED = "preempted requests"
    """Counter of requests that lost their KV cache to others."""
    FINISHED = "finished requests"
    """Counter; by the label `finished_reason` where the engine tells it."""
    PROMPT_TOKENS = "tokens of a prompt"
    """Histogram over requests."""
    TTFT = "time to first token"
    """Histogram, seconds."""
    ITL = "time between tokens"
    """Histogram, seconds: one observation a pause."""
    E2E = "time of a whole request"
    """Histogram, seconds."""
    QUEUE_TIME = "time in the queue"
    """Histogram over requests, seconds."""
    GENERATED_TOKENS = "generated tokens of a request"
    """Histogram over requests."""
    STEPS = "tokens of a step"
    """Histogram over the engine's steps that produced any."""
    WAITING_BY_REASON = "waiting requests by reason"
    """Gauge, by the label `reason`."""
    REJECTED = "requests turned away"
    """Counter: the server's queue is at its limit."""
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
        Measure.STEPS,
    }
)


@dataclass(frozen=True)
class ProgressMetrics:
    """
    The metrics by which the watchdog sees that a server makes progress.

    Attributes:
        marks: any change of one of them is progress. Each release has some.
        work: those gauges among them that count requests which run or wait.
        engine_label: the label that tells apart the engines of one server.
        deferred: metric, label and value of a gauge of waiting requests that wait for something
            else than the engine: they are no work. None: the engine counts none.
        awake: metric, label and value of a gauge that is 0 while the engine sleeps. None: it cannot
            sleep.
    """

    marks: tuple[str, ...]
    work: tuple[str, ...]
    engine_label: str
    deferred: tuple[str, str, str] | None = None
    awake: tuple[str, str, str] | None = None


@dataclass(frozen=True)
class Engine:
    """
    An engine that serves models.

    Attributes:
        name: as settings write it.
        title: as sentences write it.
        prefix: the beginning of the names of all its own metrics.
        metrics: the names of each measure, the newest first, a histogram's without `_bucket`. It
            lacks a measure that the engine does not have.
        progress: what the watchdog reads.
        program: what is started, below the folder of a release.
        arguments: a stage's arguments in groups of one line each, a flag and its values, with the
            path of the setting that each comes from: `("serving", "llama", "port")`. Raises
            `FleetError` for values that no process can receive.
        environment: the variables of a stage's process, by the id of its release and the node's
            `cuda.toolkit`. Raises `FleetError` with every name and value that no process can
            have, or that is the plan's to set.
        replica_variables: those that all ranks of a replica have, whatever their GPUs are.
        rank: what a rank of a replica over nodes is started with besides.
    """

    name: str
    title: str
    prefix: str
    metrics: Mapping[Measure, tuple[str, ...]]
    progress: ProgressMetrics
    program: str
    arguments: Callable[[Stage, Served, Vllm], list[tuple[KeyPath, tuple[str, ...]]]]
    environment: Callable[[Stage, Served, Vllm, str, str | None], dict[str, str]]
    replica_variables: Callable[[Served], dict[str, str]]
    rank: Callable[[Stage, Served, Vllm], Rank]

    def series(self, measure: Measure) -> tuple[str, ...]:
        """Return the names of a measure's samples; of a histogram those of its buckets."""
        suffix = "_bucket" if measure in HISTOGRAMS else ""
        return tuple(name + suffix for name in self.metrics.get(measure, ()))


def engines() -> tuple[Engine, ...]:
    """
    Return every engine that runs models, by name.

    A folder without an `ENGINE` knows flags alone.
    """
    found = sorted(each.name for each in pkgutil.iter_modules(room.__path__) if each.ispkg)
    modules = [import_module(f"{room.__name__}.{name}") for name in found]
    return tuple(module.ENGINE for module in modules if hasattr(module, "ENGINE"))


def engine(name: str = DEFAULT) -> Engine:
    """Return an engine by its name."""
    return next(each for each in engines() if each.name == name)


def line_beginnings(*measures: Measure) -> tuple[str, ...]:
    """Return the beginnings of the lines of any engine's page that have these measures.

    They end with the brace of the labels: a longer name is another metric.
    """
    return tuple(
        f"{name}{{" for each in engines() for measure in measures for name in each.series(measure)
    )

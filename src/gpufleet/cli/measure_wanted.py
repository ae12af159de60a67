"""Parse the arguments of `gpufleet measure`, and create its requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpufleet.errors import FleetError
from gpufleet.load_test import media_work, pooled_work, workloads
from gpufleet.load_test.arrivals import Trace
from gpufleet.load_test.level_runs import Work
from gpufleet.load_test.media_work import PICTURES, RECORDINGS, PictureWork, SoundWork
from gpufleet.load_test.pooled_work import PooledWork, parse_work
from gpufleet.load_test.written_prompts import WrittenPrompts, from_jsonl
from gpufleet.settings.serving_settings import ModelKind
from gpufleet.sizing.model_kinds import POOLS


@dataclass(frozen=True)
class MeasureOptions:
    """The parsed command line."""

    model: str | None
    replica: str | None
    gateway: str | None
    from_node: str | None
    key_file: str | None
    ca_file: str | None
    preset: str | None
    lengths: str | None
    prompts: str | None
    trace: str | None
    rate: float | None
    concurrency: int | None
    most: float | None
    share: float
    seconds: int
    guest: float | None
    processes: int | None
    seed: int
    output: Path | None
    as_json: bool
    closed_loop: bool = False
    tune: bool = False
    tries: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        exclusive = (
            ("--replica", self.replica, "--gateway", self.gateway),
            ("--lengths", self.lengths, "--prompts", self.prompts),
            ("--rate", self.rate, "--concurrency", self.concurrency),
            ("--guest", self.guest, "--concurrency", self.concurrency),
            ("--trace", self.trace, "--prompts", self.prompts),
            ("--trace", self.trace, "--concurrency", self.concurrency),
            *(
                ("--closed-loop", self.closed_loop or None, option, given)
                for option, given in (
                    ("--rate", self.rate),
                    ("--concurrency", self.concurrency),
                    ("--most", self.most),
                    ("--trace", self.trace),
                    ("--guest", self.guest),
                )
            ),
            *(
                ("--tune", self.tune or None, option, given)
                for option, given in (
                    ("--gateway", self.gateway),
                    ("--rate", self.rate),
                    ("--concurrency", self.concurrency),
                    ("--trace", self.trace),
                    ("--guest", self.guest),
                    ("--closed-loop", self.closed_loop or None),
                )
            ),
        )
        if problems := [
            f"{one} and {other} exclude each other: remove one of the two"
            for one, given, other, too in exclusive
            if given is not None and too is not None
        ]:
            raise FleetError(*problems)
        if self.tries and not self.tune:
            raise FleetError("--try works only with --tune: add --tune, or remove --try")

    @property
    def searches(self) -> bool:
        """
        Return whether the run searches for the highest load. Otherwise the options define the load.
        """
        return self.rate is None and self.concurrency is None and self.trace is None

    def work(self, kind: ModelKind) -> Work:
        """Return the requests to send to a model of this kind."""
        if self.prompts and kind == "transcribe":
            raise FleetError(
                "--prompts: gpufleet cannot read sounds from files: use --preset, or "
                "--lengths SECONDS"
            )
        if self.prompts:
            return from_jsonl(Path(self.prompts), kind)
        if not self.lengths:
            return self._preset(kind)
        if kind in POOLS:
            return parse_work(kind, self.lengths)
        if kind == "transcribe":
            return media_work.parse_sound_work(self.lengths)
        if self.lengths.count(",") == 2:
            return media_work.parse_picture_work(self.lengths)
        before, comma, after = self.lengths.partition(",")
        if not comma:
            raise FleetError(
                f"--lengths {self.lengths}: write PROMPT_TOKENS,ANSWER_TOKENS, for example "
                "1000,200; for questions about a picture, write "
                "WORDS,ANSWER_TOKENS,PIXELS, for example 32,100,512"
            )
        return workloads.Workload(
            "lengths",
            workloads.parse_lengths(before),
            workloads.parse_lengths(after),
            "as it was typed",
        )

    def _preset(self, kind: ModelKind) -> Work:
        known: Mapping[str, Work] = {**workloads.PRESETS, PICTURES.name: PICTURES}
        if kind in POOLS:
            known = {each.name: each for each in pooled_work.PRESETS[kind]}
        elif kind == "transcribe":
            known = {RECORDINGS.name: RECORDINGS}
        found = known.get(self.preset or next(iter(known)))
        if found is None:
            raise FleetError(
                f"--preset {self.preset}: the presets for `kind: {kind}` are {', '.join(known)}"
            )
        return found


def trace_work(name: str, trace: Trace, kind: ModelKind) -> workloads.Workload:
    """
    Return a workload whose requests are all as large as the largest request of a trace.

    It is used for the first request, and to measure the limit of the client.
    """
    if kind != "generate":
        raise FleetError(
            f"--trace {name}: a trace contains lengths of prompts and answers, which do not "
            f"apply to a model of `kind: {kind}`: use --preset, --lengths or --prompts"
        )
    largest = max(trace.entries, key=lambda each: each.prompt_tokens + each.tokens)
    return workloads.Workload(
        Path(name).name,
        workloads.fixed_length(largest.prompt_tokens),
        workloads.fixed_length(largest.tokens),
        "the largest request of a trace",
    )


def work_json(work: Work, seed: int, trace: str | None) -> dict[str, Any]:
    """Return the description of a workload for results. It has no contents of prompts or traces."""
    if trace:
        return {"trace": Path(trace).name, "seed": seed}
    if isinstance(work, WrittenPrompts):
        return {"prompts": work.name, "count": len(work), "seed": seed}
    if isinstance(work, PictureWork | SoundWork):
        return {**work.as_json(), "seed": seed}
    if isinstance(work, PooledWork):
        documents = {"documents": work.documents, "document": str(work.document)}
        return {
            "preset": work.name,
            "kind": work.kind,
            "input": str(work.input),
            **(documents if work.documents else {}),
            "seed": seed,
        }
    return {
        "preset": work.name,
        "input": str(work.input),
        "output": str(work.output),
        "prefix_tokens": work.prefix_tokens,
        "prefix_groups": work.prefix_groups,
        "turns": work.turns,
        "seed": seed,
    }

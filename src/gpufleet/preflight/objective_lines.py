"""Report on the objectives and the measured rates of models. Pure."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping, Sequence

from gpufleet.formatting import join_names
from gpufleet.load_test import result
from gpufleet.load_test.load_target import contract_from
from gpufleet.load_test.outcomes import Contract
from gpufleet.load_test.result import MeasuredRate, MissedContract, StoredMeasurements
from gpufleet.load_test.subjects import subject_of
from gpufleet.node.topology import Node
from gpufleet.planning.stage import Running
from gpufleet.preflight.line import Line, Status, Verdict, unknown
from gpufleet.settings.monitoring_settings import Objectives
from gpufleet.settings.serving_settings import Served

OLD_DAYS = 90
"""
A measurement that is older than this number of days is WARN, even if the settings have not changed,
because users' prompts change.
"""
_LATENCIES = ("ttft_p99_seconds", "itl_p99_seconds", "e2e_p99_seconds")


def objective_lines(models: Mapping[str, Served], inventory: str) -> Iterator[Line]:
    """
    Yield a line for each model on its objectives for latency. The keys of `models` are those of
    `serving`.
    """
    if not models:
        yield unknown("objectives", "no model is declared", f"gpufleet validate {inventory}")
    for model, served in sorted(models.items()):
        yield Line("objectives", model, _objectives(model, served.objectives))


def _objectives(model: str, found: Objectives) -> Verdict:
    set_ = [f"{name} {value:g}" for name in _LATENCIES if (value := getattr(found, name))]
    errors = f"error_ratio {found.error_ratio:g}"
    if set_:
        return Verdict(Status.OK, "has objectives", ", ".join([*set_, errors]))
    proof = f"`serving.{model}.objectives` contains no latency; {errors}"
    remedy = (
        f"set `serving.{model}.objectives.ttft_p99_seconds` (for a model that generates no text: "
        f"`e2e_p99_seconds`) to the latency that you promise your users"
    )
    return Verdict(Status.WARN, "has no objective for a latency", proof, remedy)


def measured_lines(
    models: Mapping[str, Served],
    running: Sequence[Running] | None,
    nodes: Mapping[str, Node],
    *,
    stored: StoredMeasurements,
    now: dt.datetime,
    inventory: str,
) -> Iterator[Line]:
    """
    Yield a line for each model: whether it was measured with the settings that run now, and when.

    `running` is None if it is not known which stages run. `stored` has the measurements in the
    project.
    """
    if not models:
        yield unknown("measured", "no model is declared", f"gpufleet validate {inventory}")
    for model, served in sorted(models.items()):
        remedy = f"gpufleet measure {inventory} {model}"
        mine = [each for each in running or () if each.model == model]
        if not mine:
            why = "no replica of the model runs"
            if running is None:
                why = "the running replicas are not known"
            yield unknown("measured", why, f"gpufleet status {inventory}", model)
            continue
        yield Line(
            "measured", model, _measured(mine, served, nodes, stored, now=now, remedy=remedy)
        )


def _measured(
    running: Sequence[Running],
    served: Served,
    nodes: Mapping[str, Node],
    stored: StoredMeasurements,
    *,
    now: dt.datetime,
    remedy: str,
) -> Verdict:
    replicas: dict[str, list[Running]] = {}
    for each in running:
        replicas.setdefault(each.id, []).append(each)
    contract = contract_from(served.objectives, Contract().share)
    rates: dict[str, MeasuredRate | str] = {
        name: result.measured_rate(
            stored.measurements,
            ranks[0].model,
            subject_of(ranks, served, nodes, ranks).fingerprint,
            now,
            contract,
        )
        for name, ranks in replicas.items()
    }
    unread = f"; not read: {'; '.join(stored.problems)}" if stored.problems else ""
    if missed := {name: e for name, e in rates.items() if isinstance(e, MissedContract)}:
        proof = f"{join_names(missed)}: {'; '.join(sorted({*missed.values()}))}{unread}"
        remedy = (
            "change the objectives, or change settings so that the model meets them "
            "(docs/operate/measure.md)"
        )
        return Verdict(Status.FAIL, "does not meet its objectives", proof, remedy)
    if why := sorted({each for each in rates.values() if isinstance(each, str)}):
        names = join_names([name for name, each in rates.items() if isinstance(each, str)])
        what = "was not measured in its running configuration"
        return Verdict(Status.WARN, what, f"{names}: {'; '.join(why)}{unread}", remedy)
    known = [each for each in rates.values() if isinstance(each, MeasuredRate)]
    oldest = max(known, key=lambda each: each.age_seconds)
    proof = f"{oldest}{unread}"
    if oldest.age_seconds > OLD_DAYS * 86400:
        return Verdict(Status.WARN, f"was measured more than {OLD_DAYS} days ago", proof, remedy)
    return Verdict(Status.OK, "was measured in its running configuration", proof)

"""What `--tune` tries, on which replica, and what it proposes: nothing that noise may have made."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gpufleet.cli.measure_output import proposal_lines
from gpufleet.errors import FleetError
from gpufleet.load_test.compare_results import carries_more
from gpufleet.load_test.load_target import TargetDeclaration
from gpufleet.load_test.result import Measurement, RateBracket
from gpufleet.load_test.tuning import (
    WHY,
    Trial,
    TrialRun,
    Tuning,
    choose_replica,
    deploy_data,
    fields_of,
    parse_values,
    usual_values,
)
from gpufleet.node.marks import Mark
from gpufleet.settings.serving_settings import Served
from tests.support.rows import each_row
from tests.unit.load_test.sample_results import SUBJECT, measurement
from tests.unit.upgrade.fleets import runs


def carried(kept: float | None, missed: float | None, gpus: int = 1) -> Measurement:
    subject = dataclasses.replace(SUBJECT, gpus={"NVIDIA H100 80GB HBM3": gpus})
    return measurement(levels=(), found=RateBracket(kept, missed, "found", "why"), subject=subject)


def trials(
    values: Mapping[str, tuple[int, ...]], results: Mapping[str, Measurement | str]
) -> Tuning:
    """Try all values; `results` are by the words of a trial."""
    tuning = Tuning(values)
    while (settings := tuning.next()) is not None:
        found = results[str(Trial(settings))]
        tuning.add(Trial(settings, why=found) if isinstance(found, str) else Trial(settings, found))
    return tuning


# -- what is better


@each_row(
    "a, b, more",
    [
        (carried(4, 5), carried(5, 6), True),
        (carried(4, 5), carried(4.9, 6), False),
        (carried(4, None), carried(9, 10), False),
        (carried(4, 5), carried(None, 6), False),
        (carried(None, 5), carried(6, None), True),
        # Twice the GPUs have to carry twice as much.
        (carried(4, 5), carried(8, 9, gpus=2), False),
        (carried(4, 5), carried(10, 11, gpus=2), True),
        (carried(8, 9, gpus=2), carried(5, 6), True),
    ],
)
def test_a_setting_is_better_only_where_its_rate_for_a_gpu_is_beyond_noise(
    a: Measurement, b: Measurement, more: bool
) -> None:
    assert carries_more(a, b) is more


def test_each_setting_is_tried_on_top_of_the_best_before_it() -> None:
    found = trials(
        {"max-num-seqs": (64, 256), "max-num-batched-tokens": (2048, 8192)},
        {
            "as declared": carried(4, 5),
            "max-num-seqs 64": carried(2, 3),
            "max-num-seqs 256": carried(6, 7),
            "max-num-seqs 256, max-num-batched-tokens 2048": carried(6, 7),
            "max-num-seqs 256, max-num-batched-tokens 8192": carried(8, 9),
        },
    )

    assert found.proposal is not None
    assert found.proposal.settings == {"max-num-seqs": 256, "max-num-batched-tokens": 8192}
    assert proposal_lines(found, "llama")[1:3] == [
        "  serving.llama.flags.max-num-seqs: 256",
        "  serving.llama.flags.max-num-batched-tokens: 8192",
    ]
    assert found.as_json()["proposal"]["kept"] == 8


def test_the_best_of_several_values_counts_and_not_the_last() -> None:
    found = trials(
        {"max-num-seqs": (64, 128, 256)},
        {
            "as declared": carried(4, 5),
            "max-num-seqs 64": carried(9, 10),
            "max-num-seqs 128": carried(6, 7),
            "max-num-seqs 256": carried(9.5, 11),
        },
    )

    assert found.proposal is not None
    assert found.proposal.settings == {"max-num-seqs": 64}


def test_nothing_is_proposed_within_noise_or_where_no_trial_was_measured() -> None:
    found = trials(
        {"max-num-seqs": (64, 256)},
        {
            "as declared": carried(4, 6),
            "max-num-seqs 64": "it did not start",
            "max-num-seqs 256": carried(5, 7),
        },
    )

    assert found.proposal is None
    assert found.as_json()["proposal"] is None
    assert [each["why"] for each in found.as_json()["trials"]] == ["", "it did not start", ""]
    assert proposal_lines(found, "llama") == [
        (
            "no setting that was tried serves more requests per GPU by more than the noise: "
            "keep the declared settings"
        )
    ]


def test_the_first_trial_is_what_is_declared() -> None:
    assert Tuning({"max-num-seqs": (8,)}).next() == {}


# -- what is done


class KilledError(BaseException):
    """The process has gone."""


@dataclass
class Replica:
    """A replica as values; each thing that is done to it may fail, or be the last."""

    fails: str = ""
    """What fails: `deploy {'max-num-seqs': 64}`."""
    killed_at: int | None = None
    """After so many things that were done, the process has gone."""
    runs: Mapping[str, int] = field(default_factory=dict)
    drained: bool = False
    done: list[str] = field(default_factory=list)

    def _do(self, what: str) -> None:
        if len(self.done) == self.killed_at:
            raise KilledError
        self.done.append(what)
        if what == self.fails:
            raise FleetError(f"{what} failed")

    def drain(self) -> None:
        self._do("drain")
        self.drained = True

    def deploy(self, settings: Mapping[str, int]) -> None:
        assert self.drained, "no user meets a setting that is tried"
        self._do(f"deploy {dict(settings)}")
        self.runs = settings

    def measure(self) -> tuple[Measurement, Path]:
        assert self.drained
        self._do(f"measure {dict(self.runs)}")
        seqs = self.runs.get("max-num-seqs", 8)
        return carried(seqs, seqs + 1), Path(f"{seqs}.json")

    def undrain(self) -> None:
        self._do("undrain")
        self.drained = False


VALUES = {"max-num-seqs": (64, 256)}


def try_all(replica: Replica, *, is_as_declared: bool = True) -> Tuning:
    tuning = Tuning(VALUES)
    TrialRun(tuning, replica, lambda _: None, is_as_declared=is_as_declared).run()
    return tuning


def test_the_commands_of_the_page_are_done_in_their_order() -> None:
    replica = Replica()
    found = try_all(replica)

    assert replica.done == [
        "drain",
        "measure {}",
        "deploy {'max-num-seqs': 64}",
        "measure {'max-num-seqs': 64}",
        "deploy {'max-num-seqs': 256}",
        "measure {'max-num-seqs': 256}",
        "deploy {}",
        "undrain",
    ]
    assert [each.file for each in found.trials] == [*map(Path, ("8.json", "64.json", "256.json"))]
    assert found.proposal is not None


@pytest.mark.parametrize("fails", ["deploy {'max-num-seqs': 64}", "measure {'max-num-seqs': 64}"])
def test_a_trial_that_fails_is_a_row_and_the_next_is_tried(fails: str) -> None:
    replica = Replica(fails)
    found = try_all(replica)

    assert [each.why for each in found.trials] == ["why", f"{fails} failed", "why"]
    assert (replica.runs, replica.drained) == ({}, False)


@pytest.mark.parametrize("fails", ["drain", "measure {}"])
def test_what_is_declared_has_to_be_measured_and_the_replica_is_put_back(fails: str) -> None:
    replica = Replica(fails)
    with pytest.raises(FleetError, match=f"{fails} failed"):
        try_all(replica)

    assert (replica.runs, replica.drained) == ({}, False)


def test_a_replica_that_cannot_be_put_back_stays_drained() -> None:
    replica = Replica("deploy {}")
    with pytest.raises(FleetError, match=r"deploy {} failed"):
        try_all(replica)

    assert replica.drained


@pytest.mark.parametrize("killed_at", range(8))
def test_after_a_kill_at_any_moment_the_next_run_puts_the_replica_right(killed_at: int) -> None:
    replica = Replica(killed_at=killed_at)
    with pytest.raises(KilledError):
        try_all(replica)
    replica.killed_at, replica.done = None, []
    left = replica.drained
    found = try_all(replica, is_as_declared=not left)

    if left:
        assert replica.done[:3] == ["drain", "deploy {}", "measure {}"]
    assert (replica.runs, replica.drained) == ({}, False)
    assert len(found.trials) == 3


# -- what is tried


def test_half_and_twice_what_runs_are_tried_and_divisions_that_fit() -> None:
    arguments = ("--max-num-seqs 128", "--max-num-batched-tokens 4096 ")

    assert usual_values(arguments, (1, 2, 4), 2) == {
        "max-num-seqs": (64, 256),
        "max-num-batched-tokens": (2048, 8192),
        "tensor_parallel": (1, 4),
    }


def test_common_values_are_tried_where_nothing_is_declared() -> None:
    found = usual_values(("--max-model-len 4096",), (1,), 1)

    assert found == {
        "max-num-seqs": (128, 256, 512),
        "max-num-batched-tokens": (2048, 8192, 16384),
    }


def test_one_sequence_has_no_half() -> None:
    assert usual_values(("--max-num-seqs 1",), (), 1)["max-num-seqs"] == (2,)


def test_values_that_were_typed_are_tried_in_their_order() -> None:
    assert parse_values(("tensor_parallel=2", "max-num-seqs=256,64")) == {
        "tensor_parallel": (2,),
        "max-num-seqs": (256, 64),
    }


def test_all_mistakes_of_typed_values_are_named_at_once() -> None:
    with pytest.raises(FleetError) as refused:
        parse_values(
            ("max-num-seq=8", "max-num-seqs=", "max-num-seqs=8,x", "max-num-seqs=1,2,3,4,5,6,7,8,9")
        )

    first, *rest = refused.value.problems
    assert (
        "'max-num-seq' is not a setting that gpufleet can try; did you mean 'max-num-seqs'" in first
    )
    assert ["whole numbers" in each for each in rest] == [True, True, False]
    assert "at most 8 values" in rest[-1]


def test_settings_are_deployed_and_planned_alike() -> None:
    served = Served(model="/srv/tiny", flags={"max-num-seqs": 8, "enforce-eager": True})
    settings = {"max-num-seqs": 16, "tensor_parallel": 2}

    fields = fields_of(served, settings)
    assert fields == {
        "flags": {"max-num-seqs": 16, "enforce-eager": True},
        "tensor_parallel": 2,
    }
    assert deploy_data("tiny", settings) == {
        "serving.tiny.flags.max-num-seqs": 16,
        "serving.tiny.tensor_parallel": 2,
    }
    assert served.flags["max-num-seqs"] == 8


# -- on which replica

FLEET = TargetDeclaration(
    addresses={},
    settings={},
    gateways={},
    running=(runs("tiny-0", "a", "GPU-0"), runs("tiny-1", "b", "GPU-1"), runs("big-0", "b", "x")),
    out={},
)
LEFT = Mark("ann@laptop", f"{WHY}: tries settings on tiny-0", 1.0, None)


def test_the_last_of_several_replicas_is_taken_or_the_one_that_is_named() -> None:
    assert choose_replica("tiny", None, FLEET, {})[0].id == "tiny-1"
    assert choose_replica("tiny", "tiny-0", FLEET, {})[0].id == "tiny-0"


def test_the_only_replica_is_taken_only_by_its_name() -> None:
    with pytest.raises(FleetError, match=r"big-0 is the only replica .* --replica big-0"):
        choose_replica("big", None, FLEET, {})

    assert choose_replica("big", "big-0", FLEET, {}) == (FLEET.running[2], None)


def test_a_replica_that_is_left_alone_while_another_is_drained_is_the_only_one() -> None:
    drained = dataclasses.replace(FLEET, out={"tiny-1": "drained by ann: power"})

    with pytest.raises(FleetError, match="tiny-0 is the only replica"):
        choose_replica("tiny", None, drained, {"tiny-1": Mark("ann", "power", 1.0, None)})


def test_what_a_killed_run_has_left_comes_first() -> None:
    left = dataclasses.replace(FLEET, out={"tiny-0": f"drained by {LEFT}"})

    assert choose_replica("tiny", None, left, {"tiny-0": LEFT}) == (FLEET.running[0], LEFT)


def test_a_replica_that_a_person_has_drained_is_refused_with_the_reason() -> None:
    mark = Mark("ann@laptop", "new power supply", 1.0, None)
    drained = dataclasses.replace(FLEET, out={"tiny-0": f"drained by {mark}"})

    with pytest.raises(FleetError, match=r"tiny-0 receives no requests: drained by .*power supply"):
        choose_replica("tiny", "tiny-0", drained, {"tiny-0": mark})


def test_replicas_over_several_nodes_and_unknown_ones_are_refused() -> None:
    spread = dataclasses.replace(
        FLEET, running=(runs("tiny-0", "a", "x"), runs("tiny-0", "b", "y", rank=1))
    )

    with pytest.raises(FleetError, match="tiny-0 runs on a, b together"):
        choose_replica("tiny", "tiny-0", spread, {})
    with pytest.raises(FleetError, match="no replica 'tiny-7'"):
        choose_replica("tiny", "tiny-7", FLEET, {})

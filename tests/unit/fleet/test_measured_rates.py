"""A measured rate is shown and alerted on where it holds: for what is planned, for what runs."""

from __future__ import annotations

import datetime as dt
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gpufleet.artifacts.operator_files import release_of
from gpufleet.catalog import recorded_nodes
from gpufleet.cli.plan_command import plan
from gpufleet.errors import FleetError
from gpufleet.fleet.assessment import plan_fleet
from gpufleet.fleet.declared_hardware import with_identity
from gpufleet.fleet.fleet_plan import running_stages
from gpufleet.fleet.measured_rates import (
    ModelRate,
    as_units,
    rates_for_rules,
    stored_rates,
    stored_results,
)
from gpufleet.inventory.loader import Fleet, read
from gpufleet.load_test import result
from gpufleet.load_test.outcomes import Contract
from gpufleet.load_test.result import MeasuredRate, RateBracket
from gpufleet.load_test.subjects import measurements_folder, subject_of
from gpufleet.monitoring.render import prometheus
from gpufleet.node.topology import node_from_probe
from gpufleet.serving import unit
from gpufleet.settings.monitoring_settings import Monitoring
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.serving_settings import Vllm
from gpufleet.settings.upgrade_settings import Upgrade
from gpufleet.upgrade.plan import replica_load
from gpufleet.upgrade.plan.wave_plan import WavePlan, plan_waves
from tests.support.checkout import ROOT
from tests.support.fleet_folder import VLLM, FleetFolder
from tests.unit.load_test.sample_results import measurement
from tests.unit.upgrade.fleets import group
from tests.unit.upgrade.plan.test_replica_load import finished

QWEN = "/srv/Qwen3-32B"
RELEASE = "0.32.0-1a2b3c4d5e"
WHEN = dt.datetime.now(dt.UTC).replace(microsecond=0) - dt.timedelta(days=8, hours=1)
NAMES = ("gpu-01", "gpu-02")


class MeasuredFleet:
    """Two nodes with eight H100 each, with `qwen` in two replicas and `chat` in one."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((ROOT / "tests/data/models/Qwen--Qwen3-32B.json").read_text())["config"]
        about = {"config": config, "hf_quant_config": {"missing": "absent"}, "bytes": None}
        document = {**recorded_nodes.document("h100x8"), "models": {QWEN: about}}
        self.nodes: dict[str, Any] = {name: with_identity(document, name) for name in NAMES}
        self.settings: dict[str, Any] = {
            "vllm": VLLM,
            "serving": {
                "qwen": {"model": QWEN, "replicas": 2, "flags": {"max-num-seqs": 64}},
                "chat": {"model": QWEN, "replicas": 1, "port": 8100},
            },
        }
        self.folder = FleetFolder(folder, {"gpu": NAMES}, {"gpu": self.settings})

    @property
    def inventory(self) -> str:
        return str(self.folder.inventory)

    def set(self, **flags: object) -> None:
        """Declare flags of `qwen`."""
        self.settings["serving"]["qwen"]["flags"] = flags
        self.folder.write("gpu", self.settings)

    def plan(self, *words: str) -> tuple[str, str]:
        """Return what `gpufleet plan` prints, and what it notes on standard error."""
        probes = self.folder.folder / "probes.json"
        probes.write_text(json.dumps(self.nodes))
        done = CliRunner().invoke(plan, [self.inventory, "--nodes", str(probes), *words])
        assert done.exit_code == 0, done.exception
        return done.stdout, done.stderr

    def measured(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.plan("--json")[0])["measured"]
        return found

    def start(self) -> None:
        """Have the nodes say that what is planned has units there."""
        declared = read(self.inventory).gpu_nodes
        here = NodeSettings.model_validate(self.settings)
        assert here.vllm
        for document in self.nodes.values():
            document["stages"] = []
        for stage in plan_fleet(self.nodes, declared).plan.stages:
            self.nodes[stage.node]["stages"].append(
                {
                    "unit": stage.unit,
                    "model": stage.model,
                    "replica": stage.replica,
                    "rank": 0,
                    "port": stage.port,
                    "gpus": list(stage.gpu_uuids),
                    "release": RELEASE,
                    "arguments": unit.argument_lines(stage, here.serving[stage.model], here.vllm),
                }
            )

    def measure(self, rate: float, when: dt.datetime = WHEN) -> Path:
        """Store that `qwen-0`, as it runs, keeps a rate and misses the next."""
        running = [each for each in running_stages(self.nodes) if each.id == "qwen-0"]
        topology = {name: node_from_probe(name, each) for name, each in self.nodes.items()}
        model = NodeSettings.model_validate(self.settings).serving["qwen"]
        found = measurement(
            model="qwen",
            when=when,
            target="replica qwen-0",
            contract=Contract(),
            found=RateBracket(rate, rate * 1.1, "budget"),
            subject=subject_of(running, model, topology, running),
        )
        return result.write(found, measurements_folder(self.inventory))

    def rules(self, *, silent: str = "") -> str:
        """Return the rule file that a deploy of monitoring would write."""
        answers = {name: "no answer" if name == silent else d for name, d in self.nodes.items()}
        fleet: Fleet = read(self.inventory)
        measured, problems = rates_for_rules(fleet, answers)
        assert problems == ()
        return prometheus(Monitoring(), fleet.nodes, (), measured)["rules/vllm.rules.yml"].decode()


@pytest.fixture
def fleet(tmp_path: Path) -> MeasuredFleet:
    found = MeasuredFleet(tmp_path)
    found.start()
    return found


def test_a_plan_says_nothing_of_rates_where_nothing_was_ever_measured(fleet: MeasuredFleet) -> None:
    assert "measure" not in fleet.plan()[0]
    assert fleet.measured() == []


def test_a_plan_shows_the_rate_its_date_and_for_what_it_holds(fleet: MeasuredFleet) -> None:
    fleet.measure(10)

    said, _ = fleet.plan()

    assert (f"qwen-[0-1]: measured on {WHEN:%Y-%m-%d} (8 days ago, fingerprint ") in said
    assert (
        "): each can serve 10 requests/s, but not 11; this applies to what is planned and runs\n"
    ) in said
    assert "chat-0: has no measurement" in said
    chat, qwen = sorted(fleet.measured(), key=lambda each: each["model"])
    assert (chat["requests_per_second"], chat["holds_for"]) == (None, [])
    assert (qwen["replicas"], qwen["requests_per_second"]) == (["qwen-0", "qwen-1"], 10)
    assert (qwen["measured"], qwen["holds_for"]) == (WHEN.isoformat(), ["planned", "running"])
    assert "each can serve 10 requests/s" in fleet.plan("--explain")[0]


def test_a_plan_names_what_differs_where_a_rate_holds_only_for_what_runs(
    fleet: MeasuredFleet,
) -> None:
    fleet.measure(10)
    fleet.set(**{"max-num-seqs": 128})

    said, _ = fleet.plan()

    (line,) = (each for each in said.splitlines() if each.startswith("qwen-[0-1]: measured"))
    assert "this applies to what runs, but not to what is planned: qwen was measured on" in line
    assert line.endswith("arguments --max-num-seqs 64, now --max-num-seqs 128")
    (found,) = (each for each in fleet.measured() if each["model"] == "qwen")
    assert (found["requests_per_second"], found["holds_for"]) == (10, ["running"])


def test_a_rate_of_another_release_holds_for_nothing_and_the_plan_names_both(
    fleet: MeasuredFleet,
) -> None:
    fleet.measure(10)
    for document in fleet.nodes.values():
        for stage in document["stages"]:
            stage["release"] = "0.32.0-ffffffffff"

    said, _ = fleet.plan()

    assert f"release {RELEASE}, now 0.32.0-ffffffffff" in said
    assert "requests/s" not in said
    assert "measured_requests_per_second" not in fleet.rules()


def test_what_runs_has_its_own_rate_or_reason_where_the_plan_has_another() -> None:
    rate = MeasuredRate(10, None, WHEN, 60, "gateway", 1, {}, "0123456789abcdef")
    slower = replace(rate, requests_per_second=8, fingerprint="fedcba9876543210")

    both, planned_only, new = (
        ModelRate("qwen", (0,), rate, runs) for runs in (slower, "qwen is unknown", None)
    )

    assert str(both).endswith("this applies to what is planned; what runs now serves 8 requests/s")
    assert both.holds_for == planned_only.holds_for == new.holds_for == ("planned",)
    assert str(planned_only).endswith("what is planned, but not to what runs now: qwen is unknown")
    assert str(new).endswith(
        "(less than a day ago, fingerprint 0123456789abcdef): each can serve 10 requests/s; this "
        "applies to what is planned"
    )


def test_a_planned_release_is_that_of_its_lock_and_without_one_that_of_an_equal_unit(
    fleet: MeasuredFleet,
) -> None:
    found = plan_fleet(fleet.nodes, read(fleet.inventory).gpu_nodes)
    here = NodeSettings.model_validate(fleet.settings)
    assert here.vllm
    locks = {"lock": str(ROOT / "locks/vllm-0.32.0.txt"), "uv_lock": str(ROOT / "locks/uv.txt")}
    locked = here.vllm.model_copy(update=locks)

    def releases(vllm: Vllm) -> set[str]:
        settings = dict.fromkeys(NAMES, here.model_copy(update={"vllm": vllm}))
        return {each.release for each in as_units(found.plan.stages, found.running, settings)}

    assert releases(here.vllm) == {RELEASE}
    assert releases(here.vllm.model_copy(update={"version": "0.33.0"})) == {"0.33.0"}
    assert releases(locked) == {release_of(locked).id} != {RELEASE}


def test_a_damaged_result_is_noted_and_the_plan_is_shown(fleet: MeasuredFleet) -> None:
    fleet.measure(10).write_text("{")

    said, noted = fleet.plan()

    assert "qwen" in said
    assert f"note: {measurements_folder(fleet.inventory)}/qwen" in noted


def test_rules_have_the_rates_that_hold_and_a_second_deploy_has_the_same(
    fleet: MeasuredFleet,
) -> None:
    before = fleet.rules()
    fleet.measure(10)
    with_rate = fleet.rules()

    assert "VllmNearMeasuredCapacity" not in before
    assert "10 * max by (stage, model)" in with_rate
    assert 'stage=~"qwen-0|qwen-1", instance=~"gpu-01|gpu-02"' in with_rate
    assert fleet.rules() == with_rate


def test_a_new_result_changes_the_rules_and_one_that_does_not_hold_takes_the_rate_out(
    fleet: MeasuredFleet,
) -> None:
    fleet.measure(10)
    with_rate = fleet.rules()
    fleet.measure(12, WHEN + dt.timedelta(days=2))
    newer = fleet.rules()

    assert newer != with_rate
    assert "12 * max by" in newer
    assert f'"{WHEN + dt.timedelta(days=2):%Y-%m-%d}"' in newer
    fleet.set(**{"max-num-seqs": 128})
    fleet.start()
    assert "VllmNearMeasuredCapacity" not in fleet.rules()


def test_rules_leave_out_the_replicas_of_a_node_that_does_not_answer(fleet: MeasuredFleet) -> None:
    fleet.measure(10)
    (node,) = (
        name
        for name, document in fleet.nodes.items()
        if any((each["model"], each["replica"]) == ("qwen", 1) for each in document["stages"])
    )

    text = fleet.rules(silent=node)

    assert 'stage=~"qwen-0"' in text
    assert "qwen-1" not in text


def test_an_objective_that_was_tightened_since_takes_the_rate_out(fleet: MeasuredFleet) -> None:
    fleet.measure(10)
    fleet.settings["serving"]["qwen"]["objectives"] = {"ttft_p99_seconds": 0.1}
    fleet.set(**{"max-num-seqs": 64})

    assert "VllmNearMeasuredCapacity" not in fleet.rules()
    assert "for a different contract: ttft_seconds none, now 0.1" in fleet.plan()[0]
    assert len(stored_results(fleet.inventory).measurements) == 1


# -- waves


def wave_plan(fleet: MeasuredFleet, waves: int) -> WavePlan:
    """Return the plan for a change of both replicas of `qwen`, which finish 4 requests a second."""
    running = [each for each in running_stages(fleet.nodes) if each.model == "qwen"]
    nodes = {name: node_from_probe(name, each) for name, each in fleet.nodes.items()}
    settings = {name: each.settings for name, each in read(fleet.inventory).gpu_nodes.items()}
    pages = {(each.node, port): finished(100, 116) for each in running for port in each.servers}
    loads = replica_load.loads(
        running, pages, nodes, settings, seconds=4.0,
        carries=stored_rates(fleet.inventory, running, nodes, settings),
    )  # fmt: skip
    groups = [group(each.id, each.node) for each in running]
    return plan_waves(groups, loads, Upgrade(canary=1, waves=(waves,)))


def test_a_stored_result_changes_what_a_wave_may_take(fleet: MeasuredFleet) -> None:
    """Both replicas have one of 64 slots in use; at 4 requests a second they are nearly full."""
    assert wave_plan(fleet, 1).needs["qwen"].needed == 1
    fleet.measure(10)
    assert wave_plan(fleet, 1).needs["qwen"].needed == 1, "0.8 of one replica"

    fleet.measure(4.5, WHEN + dt.timedelta(days=1))

    with pytest.raises(
        FleetError, match=r"needs 3 .* according to the capacity of the replicas that was measured"
    ):
        wave_plan(fleet, 1)


def test_a_stored_result_of_other_flags_changes_no_wave_and_the_plan_says_so(
    fleet: MeasuredFleet,
) -> None:
    before = wave_plan(fleet, 1)
    fleet.measure(4.5)
    fleet.set(**{"max-num-seqs": 128})
    fleet.start()

    after = wave_plan(fleet, 1)

    assert after.needs["qwen"].needed == before.needs["qwen"].needed == 1
    (said,) = (each for each in after.remarks if "measured" in each)
    assert said.startswith(
        "qwen-0, qwen-1: gpufleet does not use a measured rate: qwen was measured"
    )
    assert said.endswith("arguments --max-num-seqs 64, now --max-num-seqs 128")

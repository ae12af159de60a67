"""What holds for every plan, on drawn fleets: no rule here depends on how the plan is found."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import combinations

import yaml
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from gpufleet.errors import FleetError
from gpufleet.node.topology import Domain, Gpu, Node
from gpufleet.planning.explanation import Action, candidate_rows, explain, plan_changes
from gpufleet.planning.planner import plan
from gpufleet.planning.serving_options import sizing_options
from gpufleet.planning.stage import Running
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.sizing import fit
from tests.support.models import described
from tests.support.rows import each_row

VLLM = {"version": "0.32.0", "lock": "locks/vllm.txt", "api_key_file": "secrets/api-key"}
CARDS = {
    "NVIDIA H100 80GB HBM3": (81559, (9, 0)),
    "NVIDIA L40S": (46068, (8, 9)),
    "NVIDIA A100-SXM4-80GB": (81920, (8, 0)),
}
SLOW = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=60)

# For a part of a GPU, one, several, and more than some nodes have.
MODELS = {
    "tiny": "Qwen--Qwen3-0.6B",
    "small": "meta-llama--Meta-Llama-3.1-8B",
    "dense": "Qwen--Qwen3-32B",
    "latent": "deepseek-ai--DeepSeek-V2-Lite",
    "experts": "Qwen--Qwen3-30B-A3B",
    "large": "meta-llama--Meta-Llama-3.1-70B",
}


def machine(name, card, sizes, numa=2):
    """A node of one kind of GPU in NVLink islands of the given sizes."""
    memory, capability = CARDS[card]
    count = sum(sizes)
    starts = [sum(sizes[:at]) for at in range(len(sizes))]
    islands = [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    return Node(
        name=name,
        driver="580.95.05",
        cuda=(13, 0),
        gpus=tuple(
            Gpu(
                index=index,
                uuid=f"GPU-{name}-{index}",
                name=card,
                bus_id=f"0000:{index:02x}:00.0",
                memory_mib=memory,
                compute_capability=capability,
                numa_node=index * numa // count,
            )
            for index in range(count)
        ),
        nvlink={pair: 18 for part in islands for pair in combinations(part, 2)},
        pcie=dict.fromkeys(combinations(range(count), 2), "SYS"),
    )


@st.composite
def kinds(draw):
    """A card and the islands of a node; whole boards more often than odd ones."""
    islands = [(8,), (8,), (4, 4), (4,), (2, 2), (1, 1, 1, 1), (3,)]
    return draw(st.sampled_from(sorted(CARDS))), draw(st.sampled_from(islands))


@st.composite
def nodes(draw, name, alike=kinds()):  # noqa: B008  # a strategy is a value
    card, islands = draw(alike)
    clique = draw(st.sampled_from([None, None, Domain("8f1d", 1), Domain("8f1d", 2)]))
    node = replace(machine(name, card, islands), domain=clique)
    if draw(st.integers(0, 5)):
        return node
    lost = draw(st.sampled_from(node.gpus)).index
    left = tuple(gpu for gpu in node.gpus if gpu.index != lost)
    return replace(node, gpus=left, unfit={lost: "ecc-uncorrected"})


@st.composite
def models(draw):
    """Models by name, each as an operator may declare it."""
    found = {}
    names = st.lists(st.sampled_from(sorted(MODELS)), unique=True, min_size=1, max_size=3)
    for number, name in enumerate(draw(names)):
        served = {
            "model": "/srv/model",
            "replicas": draw(st.sampled_from([1, 1, 2, "fit"])),
            "objective": draw(st.sampled_from(["balanced", "latency", "throughput", "memory"])),
            "context": draw(st.sampled_from([2048, 8192])),
            "concurrency": draw(st.sampled_from([1, 1, 4])),
            "allow_pcie": draw(st.booleans()),
            "span_nodes": draw(st.booleans()),
        }
        if draw(st.integers(0, 4)) == 0:
            served["tensor_parallel"] = draw(st.sampled_from([1, 2, 4, 8, 16]))
        if draw(st.integers(0, 7)) == 0:
            served["data_parallel"] = draw(st.sampled_from([2, 8, 16]))
        if draw(st.integers(0, 7)) == 0:
            served["pipeline_parallel"] = draw(st.sampled_from([2, 4]))
        ports = {"port": 9000 + 100 * number}, {}, {}, {"port": draw(st.sampled_from([8000, 8001]))}
        found[name] = served | draw(st.sampled_from(ports))
    return found


@st.composite
def fleets(draw):
    """Nodes, often alike, and which models each of them declares."""
    few = st.sampled_from(draw(st.lists(kinds(), min_size=1, max_size=2)))
    found = [draw(nodes(f"gpu-{number:02}", few)) for number in range(draw(st.integers(2, 4)))]
    declared = draw(models())
    everywhere = draw(st.integers(0, 2)) > 0
    declarations = {
        node.name: NodeSettings.model_validate(
            {
                "vllm": VLLM,
                "serving": {
                    name: served
                    for name, served in declared.items()
                    if everywhere or draw(st.booleans())
                },
            }
        )
        for node in found
    }
    return found, declarations


def planned(nodes, declarations, running=(), **others):
    names = {node.name for node in nodes}
    wanted = {name: each for name, each in declarations.items() if name in names}
    return plan(
        nodes, wanted, {name: described(MODELS[name]) for name in MODELS}, running, **others
    )


def outcome(*arguments, **others):
    try:
        return planned(*arguments, **others)
    except FleetError as refused:
        return refused.problems


def running_of(found):
    return [
        Running(
            stage.model, stage.replica, stage.node, stage.gpu_uuids, stage.port, stage.node_rank
        )
        for stage in found.stages
    ]


def by_replica(found):
    replicas = defaultdict(list)
    for stage in found.stages:
        replicas[stage.model, stage.replica].append(stage)
    return replicas


def served_of(declarations):
    return {name: each for node in declarations.values() for name, each in node.serving.items()}


def check(found, nodes, declarations, reserved=None):
    """The rules that no plan may break."""
    fleet = {node.name: node for node in nodes}
    declared = served_of(declarations)
    used = Counter((stage.node, gpu) for stage in found.stages for gpu in stage.gpus)
    ports = Counter((stage.node, stage.port) for stage in found.stages)
    exporters = Counter((name, each.node_exporter.port) for name, each in declarations.items())
    assert max([*used.values(), *(ports + exporters).values()], default=1) == 1
    for stage in found.stages:
        node, served = fleet[stage.node], declared[stage.model]
        assert stage.model in declarations[stage.node].serving
        uuids = {gpu.index: gpu.uuid for gpu in node.gpus}
        assert stage.gpu_uuids == tuple(uuids[gpu] for gpu in stage.gpus)
        assert not set(stage.gpus) & set((reserved or {}).get(stage.node, ()))
        if stage.nodes:
            assert served.span_nodes
        whole = stage.expert_parallel and stage.data_parallel > 1
        unit = len(stage.gpus) if whole else min(stage.tensor_parallel, len(stage.gpus))
        for start in range(0, len(stage.gpus), unit):
            group = stage.gpus[start : start + unit]
            joined = all(pair in node.nvlink for pair in combinations(sorted(group), 2))
            assert joined or served.allow_pcie
        (considered,) = [
            each
            for each in found.candidates
            if each.model == stage.model and stage.node in each.names
        ]
        kind, chosen = considered.kind, considered.chosen
        division = chosen.division
        assert (division.tensor_parallel, division.pipeline_parallel) == (
            stage.tensor_parallel,
            stage.pipeline_parallel,
        )
        # Asked anew, not taken from the plan: what was found is what is placed.
        asked = fit.size(described(MODELS[stage.model]), sizing_options(served, kind, division))
        assert asked.fits or (
            served.tensor_parallel is not None and asked.confidence == "near the edge"
        )
        assert served.tensor_parallel or (
            asked.max_concurrency * division.data_parallel >= served.concurrency
        )
    for (model, _), stages in by_replica(found).items():
        assert sum(len(stage.gpus) for stage in stages) == (
            stages[0].tensor_parallel * stages[0].pipeline_parallel * stages[0].data_parallel
        )
        assert [stage.node_rank for stage in stages] == list(range(len(stages)))
        assert len({stage.node for stage in stages}) == len(stages)
        assert len({len(stage.gpus) for stage in stages}) == 1
        assert len({stage.port for stage in stages}) == 1, model
        names = {gpu.name for stage in stages for gpu in fleet[stage.node].gpus}
        assert len(names) == 1, "a replica never mixes kinds of GPU"
    counts = Counter(model for model, _ in by_replica(found))
    for name, served in declared.items():
        if served.replicas == "fit":
            assert counts[name] >= 1
        else:
            assert counts[name] == served.replicas


@SLOW
@given(fleets())
def test_every_plan_keeps_the_rules(fleet):
    """Memory, islands, GPUs, ports, counts: all read off the stages."""
    found = outcome(*fleet)
    assume(not isinstance(found, tuple))

    check(found, *fleet)


@SLOW
@given(fleets(), st.data())
def test_reserved_gpus_and_ports_of_others_stay_theirs(fleet, data):
    """What others use is as good as not there."""
    machines, declarations = fleet
    reserved = {
        node.name: data.draw(st.sets(st.sampled_from([gpu.index for gpu in node.gpus]), max_size=2))
        for node in machines
        if node.gpus
    }
    ports = {node.name: {8000, 8002} for node in machines}

    found = outcome(machines, declarations, reserved=reserved, ports=ports)
    assume(not isinstance(found, tuple))

    check(found, machines, declarations, reserved)
    assert not {stage.port for stage in found.stages} & {8000, 8002}


@SLOW
@given(fleets(), st.randoms(use_true_random=False))
def test_the_order_of_what_is_given_moves_nothing(fleet, random):
    """Nodes answer, files are read and units are listed in any order."""
    machines, declarations = fleet
    before = outcome(machines, declarations)
    running = [] if isinstance(before, tuple) else running_of(before)[1:]
    shuffled = [
        (
            name,
            each.model_copy(
                update={"serving": dict(random.sample([*each.serving.items()], len(each.serving)))}
            ),
        )
        for name, each in random.sample([*declarations.items()], len(declarations))
    ]

    again = outcome(
        random.sample(machines, len(machines)),
        dict(shuffled),
        random.sample(running, len(running)),
    )

    assert again == outcome(machines, declarations, running)


@SLOW
@given(fleets())
def test_what_runs_as_planned_stays(fleet):
    """The second run of the same deploy changes nothing, and says so."""
    found = outcome(*fleet)
    assume(not isinstance(found, tuple))

    again = planned(*fleet, running_of(found))

    assert again.stages == found.stages
    assert again.moves == ()
    assert {each.action for each in plan_changes(again, running_of(found))} <= {Action.STAY}


def moved_unsaid(before, after, touched=()):
    """Replicas that ran on none of `touched` and changed without a reason in the plan."""
    said = {(move.model, move.replica) for move in after.moves}
    now = by_replica(after)
    return [
        key
        for key, stages in by_replica(before).items()
        if not {stage.node for stage in stages} & set(touched)
        and now.get(key) != stages
        and key not in said
    ]


@SLOW
@given(fleets())
def test_losing_a_node_moves_no_replica_that_did_not_touch_it(fleet):
    """But where a model with a fixed number takes GPUs from a later one, which the plan says."""
    machines, declarations = fleet
    before = outcome(machines, declarations)
    assume(not isinstance(before, tuple) and len(machines) > 1)

    for lost in machines:
        left = [node for node in machines if node is not lost]
        after = outcome(left, declarations, running_of(before))
        if isinstance(after, tuple):
            continue
        assert not moved_unsaid(before, after, {lost.name})
        check(after, left, {node.name: declarations[node.name] for node in left})
        for move in after.moves:
            ran = {stage.node for stage in move.before}
            assert lost.name in ran or "needs its GPUs" in move.why
            assert str(move) in after.reasons


@SLOW
@given(fleets(), nodes("gpu-00a"), st.data())
def test_a_new_node_moves_nothing(fleet, node, data):
    """It only takes what is new: not even the numbers of those that run change."""
    machines, declarations = fleet
    before = outcome(machines, declarations)
    assume(not isinstance(before, tuple) and node.gpus)
    like = data.draw(st.sampled_from(sorted(declarations)))

    after = outcome(
        [*machines, node], {**declarations, node.name: declarations[like]}, running_of(before)
    )
    if isinstance(after, tuple):  # such as a model that the other kind of node cannot take at all
        return

    assert after.moves == ()
    assert set(before.stages) <= set(after.stages)


@SLOW
@given(fleets(), st.data())
def test_a_gpu_that_fails_moves_only_what_ran_on_its_node(fleet, data):
    """The node is another kind then, and that is nobody else's business."""
    machines, declarations = fleet
    before = outcome(machines, declarations)
    assume(not isinstance(before, tuple) and before.stages)
    stage = data.draw(st.sampled_from(before.stages))
    hurt = [
        replace(
            node,
            gpus=tuple(gpu for gpu in node.gpus if gpu.index != stage.gpus[0]),
            unfit={**node.unfit, stage.gpus[0]: "xid"},
        )
        if node.name == stage.node
        else node
        for node in machines
    ]

    after = outcome(hurt, declarations, running_of(before))
    if isinstance(after, tuple):
        return

    assert not moved_unsaid(before, after, {stage.node})
    check(after, hurt, declarations)


@SLOW
@given(
    fleets(), st.lists(st.sampled_from(["lose", "return", "grow", "shrink"]), max_size=6), st.data()
)
def test_a_fleet_goes_through_its_days(fleet, days, data):
    """Nodes go and come back with what ran on them, replicas are asked for and no longer."""
    machines, declarations = fleet
    here = {node.name: node for node in machines}
    runs = {}  # by node, what runs there; a node that is away keeps it
    for day in ["start", *days]:
        if day == "lose" and len(here) > 1:
            del here[data.draw(st.sampled_from(sorted(here)))]
        away = [node for node in machines if node.name not in here]
        if day == "return" and away:
            here[away[0].name] = away[0]
        if day in {"grow", "shrink"}:
            declarations = more(declarations, 1 if day == "grow" else -1)
        nodes = [*here.values()]
        wanted = {name: declarations[name] for name in here}
        running = [each for name in here for each in runs.get(name, [])]
        found = outcome(nodes, wanted, running)
        if isinstance(found, tuple):
            continue  # nothing is changed by a plan that is refused
        check(found, nodes, wanted)
        stays = {
            (stage.model, stage.replica, stage.node, stage.gpu_uuids, stage.port, stage.node_rank)
            for stage in found.stages
        }
        said = {(move.model, move.replica) for move in found.moves}
        for each in running:
            now = (each.model, each.replica, each.node, each.gpu_uuids, each.port, each.rank)
            assert now in stays or (each.model, each.replica) in said
        for name in here:
            runs[name] = [each for each in running_of(found) if each.node == name]


def more(declarations, step):
    """Every model's number of replicas, changed by one."""

    def changed(served):
        if served.replicas == "fit":
            return served
        return served.model_copy(update={"replicas": max(1, served.replicas + step)})

    return {
        node: each.model_copy(
            update={"serving": {name: changed(served) for name, served in each.serving.items()}}
        )
        for node, each in declarations.items()
    }


SETTING = re.compile(r"`([\w-]+): (\w+)`( in `flags`)?")
LOWER = re.compile(r"(?:lower|raise) `(\w+_parallel|replicas)` to (\d+)()")


def told(problem):
    """What a refusal says to write: each way by itself, one or several settings."""
    ways = [SETTING.findall(way) for way in problem.split(", or ")]
    return [way for way in ways if way] + [[way] for way in LOWER.findall(problem)]


def written(served, way):
    """The declaration after one of these ways."""
    settings = {key: yaml.safe_load(value) for key, value, in_flags in way if not in_flags}
    flags = {key: yaml.safe_load(value) for key, value, in_flags in way if in_flags}
    return served.model_copy(update={**settings, "flags": {**served.flags, **flags}})


@SLOW
@given(fleets())
def test_a_refusal_names_a_setting_that_ends_it(fleet):
    """Each way that it names alone: the same sentence does not come back."""
    machines, declarations = fleet
    problems = outcome(machines, declarations)
    assume(isinstance(problems, tuple))

    for problem in problems:
        if not (model := re.match(r"serving\.(\w+):", problem)):
            continue
        for way in told(problem):
            changed = {
                name: each.model_copy(
                    update={
                        "serving": {
                            at: written(served, way) if at == model[1] else served
                            for at, served in each.serving.items()
                        }
                    }
                )
                for name, each in declarations.items()
            }
            after = outcome(machines, changed)
            again = [] if not isinstance(after, tuple) else [same_cause(each) for each in after]
            assert same_cause(problem) not in again, way


def same_cause(problem):
    """The model and what it is refused for, without the numbers."""
    causes = ("no division fits", "in one NVLink island", "in one node", "asked for", "not know")
    model = problem.split(":")[0]
    return model, next((cause for cause in causes if cause in problem), problem)


@SLOW
@given(fleets())
def test_the_explanation_names_every_candidate_and_its_reason(fleet):
    """Nothing is rejected without a sentence, and what is placed is marked."""
    machines, declarations = fleet
    found = outcome(machines, declarations)
    assume(not isinstance(found, tuple))

    text = explain(found, machines)

    for row in candidate_rows(found):
        assert row.reason
        assert row.reason in text
    placed = {(stage.model, stage.tensor_parallel) for stage in found.stages}
    assert placed <= {
        (row.model, row.tensor_parallel) for row in candidate_rows(found) if row.chosen
    }


@each_row("profile", ["h100x8", "a100x4-pcie", "gb200x4", "l40sx8", "b200x8"])
@each_row("objective", ["balanced", "latency", "throughput", "memory"])
def test_recorded_nodes_take_as_many_as_fit(recorded, profile, objective):
    """On real layouts: nothing breaks a rule, and no room for another replica is left."""
    machines = [recorded(profile, "gpu-01"), recorded(profile, "gpu-02")]
    served = {
        "model": "/srv/model",
        "replicas": "fit",
        "objective": objective,
        "context": 8192,
    }
    declarations = {
        node.name: NodeSettings.model_validate({"vllm": VLLM, "serving": {"experts": served}})
        for node in machines
    }

    found = outcome(machines, declarations)

    if isinstance(found, tuple):
        assert "no division fits" in found[0]
        return
    (considered,) = found.candidates
    assert len(by_replica(found)) == considered.chosen.replicas

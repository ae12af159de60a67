"""What is said of a node's interconnect: islands, how far tensor parallelism goes, what to know."""

from __future__ import annotations

import json
from itertools import combinations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpufleet.errors import FleetError
from gpufleet.formatting import ranges
from gpufleet.node.interconnect import Interconnect, from_matrix, from_probe
from gpufleet.node.interconnect_warnings import switch_links
from gpufleet.node.probe_document import SCHEMA
from gpufleet.node.smi_topology import PCIE, parse
from tests.support.checkout import ROOT
from tests.support.rows import each_row

DATA = ROOT / "tests/data"

# The machine may do other things at the same time.
ANY_PACE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

# The same hardware as the lab's profile records it and as nvidia-smi prints it.
TWINS = {
    "h100x8": "hgx-h100",
    "a100x8": "hgx-a100",
    "a100x4-pcie": "a100-pcie-pairs",
    "l40sx8": "l40s-pcie",
    "gb200x4": "gb200",
    "t4x1": "t4-single",
}


def sample(name: str) -> Interconnect:
    return from_matrix(name, parse((DATA / f"topo/{name}.txt").read_text()))


@pytest.fixture
def document():
    """`document("h100x8")`: a recorded probe, free to be changed."""

    def load(profile):
        return json.loads(
            (ROOT / f"src/gpufleet/catalog/data/nodes/{profile}.json").read_text()
        ) | {"schema": SCHEMA}

    return load


def node(count: int, links: dict[tuple[int, int], int], **more) -> Interconnect:
    gpus = tuple(range(count))
    classes = {
        pair: f"NV{links[pair]}" if pair in links else "SYS" for pair in combinations(gpus, 2)
    }
    return Interconnect("n", gpus, classes, **more)


def clique(gpus, width=18):
    return dict.fromkeys(combinations(gpus, 2), width)


EIGHT = tuple(range(8))
ALONE = tuple((gpu,) for gpu in EIGHT)


@each_row(
    ("name", "islands", "max_tp"),
    [
        ("dgx-1v", ((0, 1, 2, 3), (4, 5, 6, 7)), 4),
        ("hgx-a100", (EIGHT,), 8),
        ("hgx-h100", (EIGHT,), 8),
        ("h100-dead-link", (EIGHT,), 8),
        ("a100-pcie-pairs", ((0, 1), (2, 3)), 2),
        ("h100-nvl", ((0, 1), (2, 3)), 2),
        ("l40s-pcie", ALONE, 1),
        ("rtx4090", ALONE, 1),
        ("gb200", ((0, 1, 2, 3),), 4),
        ("t4-single", ((0,),), 1),
    ],
)
def test_islands_and_tensor_parallelism_of_real_boards(name, islands, max_tp):
    found = sample(name)

    assert (found.islands, found.max_tp) == (islands, max_tp)


@each_row(("profile", "name"), TWINS.items())
def test_the_probe_and_the_pasted_matrix_of_one_board_say_the_same(document, profile, name):
    recorded, pasted = from_probe(name, document(profile)), sample(name)

    assert recorded.islands == pasted.islands
    assert recorded.max_tp == pasted.max_tp
    assert recorded.nvlink == pasted.nvlink


@pytest.mark.parametrize("name", ["hgx-a100", "hgx-h100", "gb200", "t4-single"])
def test_boards_that_have_nothing_to_know_have_no_warnings(name):
    assert sample(name).warnings == ()


@ANY_PACE
@given(st.integers(1, 16))
def test_tensor_parallelism_is_the_largest_power_of_two_on_an_island(size):
    """Eight does not fit on seven: an all-reduce of eight needs eight."""
    found = node(size, clique(range(size))).max_tp

    assert found in {1, 2, 4, 8, 16}
    assert found <= size < 2 * found


# --- warnings


@each_row(
    ("name", "says"),
    [
        ("h100-dead-link", "GPU 3 has 17 NVLinks, but other GPUs of island 0-7 have 18: a link is"),
        ("dgx-1v", "so these GPUs form 2 islands (0-3 | 4-7)"),
        ("dgx-1v", "differ (NV1 and NV2) in 0-3 | 4-7, and every GPU uses as many links"),
        (
            "dgx-1v",
            "a tensor-parallel size above 4 does not only use NVLink, but crosses PCIe and the "
            "link",
        ),
        ("a100-pcie-pairs", "a tensor-parallel size above 2 does not only use NVLink"),
        ("h100-nvl", "no NIC is near GPUs 2-3"),
        ("l40s-pcie", "(groups of near GPUs: PIX: 0-1 | 2-3 | 4-5 | 6-7; NODE: 0-3 | 4-7)"),
        ("rtx4090", "all GPUs are next to NUMA node 0"),
        ("rtx4090", "are GeForce cards, and NVIDIA's driver allows no peer access"),
    ],
)
def test_what_there_is_to_know_is_said(name, says):
    assert says in "\n".join(sample(name).warnings)


V100 = dict.fromkeys(range(4), "Tesla V100-SXM2-16GB")
HALF_A_CUBE = {(0, 1): 1, (0, 2): 1, (0, 3): 2, (1, 2): 2, (1, 3): 1, (2, 3): 2}
PAIRS = {(0, 1): 12, (2, 3): 4}
SIX = {pair: 4 for pair in combinations(range(4), 2) if pair != (0, 3)}
GRACE = {"nics": {"mlx5_0": dict.fromkeys(range(4), "SYS")}, "numa": {0: 0, 1: 0, 2: 1, 3: 1}}


@each_row(
    ("found", "says", "never"),
    [
        # Two bridged pairs of unlike cards: each as wide as it is built.
        (
            node(4, PAIRS, models={0: "A", 1: "A", 2: "B", 3: "B"}),
            "a tensor-parallel size above 2",
            "a bridge is missing",
        ),
        (node(4, PAIRS, models=dict.fromkeys(range(4), "A")), "a bridge is missing", "unless"),
        (node(4, PAIRS), "a bridge is missing, unless its cards are a different model", "down;"),
        # p3.8xlarge: four V100 of a cube mesh, the ends of the double line use a link less.
        (node(4, HALF_A_CUBE, models=V100), "eight V100 is wired this way", "a link may be down"),
        (node(4, HALF_A_CUBE), "that are not in this machine", "a link may be down"),
        (node(4, HALF_A_CUBE | {(0, 3): 1}, models=V100), "a link may be down", "wired so"),
        (
            node(4, HALF_A_CUBE, models=dict.fromkeys(range(4), "A")),
            "a link may be down",
            "wired so",
        ),
        # One GPU off NVLink beside seven.
        (
            node(8, clique((0, 1, 2, 3, 4, 6, 7))),
            "no NVLink connects GPU 5 to any other GPU, but GPUs 0-4,6-7 are connected by NV18. "
            "The "
            "NVLinks of GPU 5 are down, or the GPU is in MIG mode, or the model is different. "
            "Check "
            "`nvidia-smi nvlink -s -i 5`",
            "wired so",
        ),
        (
            node(5, clique(range(4)), models=dict.fromkeys(range(4), "A100") | {4: "DGX Display"}),
            "",
            "no NVLink connects",
        ),
        (node(3, clique(range(2))), "", "no NVLink connects"),
        # All pairs SYS on two NUMA nodes.
        (
            node(4, {}, numa={0: 0, 1: 0, 2: 1, 3: 1}),
            "gpufleet groups GPUs by NUMA node (0-1 at node 0 | 2-3 at node 1)",
            "one group",
        ),
        (node(4, {}, numa={0: 0, 1: 0, 2: 1}), "", "groups GPUs by NUMA node"),
        (node(3, {}, numa={0: 0, 1: 1, 2: 2}), "", "groups GPUs by NUMA node"),
        # SXM boards without any NVLink.
        (
            node(2, {}, models=dict.fromkeys(range(2), "NVIDIA H100 80GB HBM3")),
            "GPUs 0-1 are boards that are only sold with NVLink, but NVLink connects no two of "
            "them. Either nvidia-fabricmanager does not run",
            "wired so",
        ),
        (
            node(2, {}, models=dict.fromkeys(range(2), "NVIDIA H100 PCIe")),
            "",
            "only sold with NVLink",
        ),
        # MIG instances have no peer access.
        (
            node(2, clique(range(2)), mig=frozenset({0, 1})),
            "GPUs 0-1 are partitioned into MIG instances. MIG instances have no peer access",
            "only sold with NVLink",
        ),
        # Every NIC is SYS on Grace.
        (
            node(4, clique(range(4)), c2c=frozenset(range(4)), **GRACE),
            "Use NUMA nodes instead (GPUs 0-1 at node 0 | 2-3 at node 1)",
            "no NIC is near any",
        ),
        # A bridge over four cards with one dead pair.
        (
            node(4, SIX),
            "NVLink connects every pair of GPUs 0-3 except 0 and 3, but tensor parallelism "
            "communicates between all pairs. The link between 0 and 3 is down: check `nvidia-smi "
            "nvlink -s -i 0,3`, then reset both GPUs or reseat the bridge. Until then, GPUs 0-1 | "
            "2-3 can each run a tensor-parallel size of 2",
            "leaves 1 of these GPUs unused",
        ),
    ],
)
def test_a_sentence_is_about_what_is_the_matter(found, says, never):
    said = "\n".join(found.warnings)

    assert says in said, said
    assert never not in said, said


def test_mig_instances_have_no_tensor_parallelism():
    found = node(4, clique(range(4)), mig=frozenset({0, 1}))

    assert (found.islands, found.max_tp) == (((2, 3), (0,), (1,)), 2)
    assert node(2, clique(range(2)), mig=frozenset({0, 1})).why == (
        "MIG instances have no peer access to each other"
    )


def test_mig_and_grace_are_read_from_both_sources(document):
    cut = document("h100x8")
    cut["gpus"][1]["mig_mode"] = {"current": 1, "pending": 1}
    listed = "GPU 0: NVIDIA H200 (UUID: GPU-0)\nGPU 1: NVIDIA H200 (UUID: GPU-1)\n"
    listed += "  MIG 1g.18gb     Device  0: (UUID: MIG-1)\n"
    listed += "\tGPU0\tGPU1\nGPU0\t X \tNV18\nGPU1\tNV18\t X \n"

    assert from_probe("n", cut).mig == {1}
    assert from_matrix("n", parse(listed)).mig == {1}
    assert from_probe("n", document("gb200x4")).c2c == sample("gb200").c2c == {0, 1, 2, 3}
    assert not from_probe("n", document("h100x8")).c2c | sample("hgx-h100").c2c


def test_a_dead_link_is_one_warning_about_the_gpu_that_lost_it():
    (warning,) = sample("h100-dead-link").warnings

    assert warning.startswith("GPU 3 ")
    assert "nvidia-smi nvlink -s -i 3" in warning


def test_seven_of_eight_say_what_fits_and_what_is_left_over():
    (warning,) = node(7, clique(range(7))).warnings

    assert warning == (
        "NVLink connects 7 GPUs (0-6). A tensor-parallel size of 8 does not fit. A size of 4 fits, "
        "and leaves 3 of these GPUs unused"
    )


def test_a_bridge_that_is_narrower_than_its_twin_is_said():
    found = node(4, {(0, 1): 12, (2, 3): 8})

    assert any(
        "island 2-3 has NV8, but another island of the same size has NV12" in w
        for w in found.warnings
    )
    assert not any("narrower" in w or "NV8" in w for w in sample("h100-nvl").warnings)


def test_islands_of_other_sizes_are_no_measure():
    found = node(6, clique(range(4), 6) | {(4, 5): 12})

    assert not any("island 0-3 has" in warning for warning in found.warnings)


def test_groups_that_are_no_larger_than_an_island_are_not_offered():
    found = node(6, {(0, 1): 12})
    found = Interconnect("n", found.gpus, {**found.classes, (2, 3): "PIX"})

    (warning,) = found.warnings
    assert warning.startswith("a tensor-parallel size above 2 does not only use NVLink")
    assert "groups of near GPUs" not in warning


def test_two_numa_nodes_are_not_one_group():
    found = node(4, {}, numa={0: 0, 1: 0, 2: 1, 3: 1})

    assert not any("NUMA node 0" in warning for warning in found.warnings)


def test_a_mesh_that_lost_a_link_is_not_called_wired_so():
    """DGX-1V without one of the two links between 0 and 3: these use five, the others six."""
    whole = sample("dgx-1v")
    broken = Interconnect("n", whole.gpus, {**whole.classes, (0, 3): "NV1"})

    said = "\n".join(broken.warnings)

    assert "GPUs 0,3 use the fewest" in said
    assert "in 4-7, and every GPU uses as many" in said


def test_nics_that_are_far_from_every_gpu_are_one_sentence():
    found = node(2, clique(range(2)), nics={"mlx5_0": {0: "SYS", 1: "SYS"}})

    assert found.warnings == (
        "no NIC is near any GPU (the nearest is SYS), so traffic to other nodes crosses the link "
        "between NUMA nodes",
    )


def test_one_geforce_needs_no_caution():
    assert node(1, {}, models={0: "NVIDIA GeForce RTX 4090"}).warnings == ()


# --- what a probe tells beyond a matrix


def test_a_gpu_that_does_not_answer_is_not_in_the_picture_and_said(document):
    found = document("h100x8")
    lost = {"missing": "lost", "code": 15}
    found["gpus"][5] = {"index": 5, **lost}
    for section in ("nvlink", "numa"):
        found[section][5] = lost
    for matrix in (*found["p2p"].values(), found["pcie"]):
        for other in range(8):
            if other != 5:
                matrix[5][other] = matrix[other][5] = {"missing": "no_gpu"}

    seven = from_probe("gpu-01", found)

    assert seven.gpus == (0, 1, 2, 3, 4, 6, 7)
    assert seven.max_tp == 4
    assert "GPU 5 does not answer (lost), so it is in no NVLink island" in seven.warnings[0]
    assert any("NVLink connects 7 GPUs (0-4,6-7)" in warning for warning in seven.warnings)
    assert len(seven.warnings) == 2


def test_a_driver_that_does_not_start_is_said(document):
    found = document("t4x1")
    found["driver"]["init"] = {"missing": "driver_not_loaded", "code": 9}
    found["gpus"] = found["nvlink"] = found["numa"] = found["fabric"] = found["pcie"] = []
    found["p2p"] = {kind: [] for kind in found["p2p"]}

    nothing = from_probe("gpu-01", found)

    assert (nothing.gpus, nothing.islands, nothing.max_tp) == ((), (), 1)
    assert nothing.why == "no GPU answers"
    assert "the driver does not start (driver not loaded)" in nothing.warnings[0]


def test_links_that_nobody_may_use_join_nothing_and_are_said(document):
    found = document("h100x8")
    found["p2p"]["nvlink"] = [[None if i == j else 5 for j in range(8)] for i in range(8)]

    without = from_probe("gpu-01", found)

    assert without.max_tp == 1
    assert "NVLinks between GPUs 0-7 are up, but the driver allows no peer" in without.warnings[0]


def test_a_link_that_one_end_alone_sees_is_said(document):
    found = document("a100x4-pcie")
    found["nvlink"][0]["links"][0]["state"] = 0

    node = from_probe("gpu-01", found)

    assert node.nvlink[0, 1] == 11
    assert "GPU 1 reports 12 NVLinks to GPU 0, but GPU 0 reports 11" in node.warnings[0]


def test_distances_that_could_not_be_read_are_said(document):
    found = document("l40sx8")
    found["pcie"][2] = [None if column == 2 else {"missing": "timeout"} for column in range(8)]

    node = from_probe("gpu-01", found)

    assert node.classes[2, 3] == "SYS"
    assert "the PCIe distance of GPU 2 to other GPUs could not be read" in node.warnings[0]


@each_row("gone", ["driver", "gpus", "numa", "p2p", "pcie", "nics", "pci"])
def test_a_probe_with_a_part_missing_is_refused(document, gone):
    found = document("h100x8")
    del found[gone]

    with pytest.raises(FleetError, match=r"gpu-01: the probe is incomplete.* again"):
        from_probe("gpu-01", found)


def test_a_probe_of_another_schema_is_refused(document):
    with pytest.raises(FleetError, match="schema 0"):
        from_probe("gpu-01", document("t4x1") | {"schema": 0})


# --- JSON


def test_the_json_says_all_of_it():
    found = json.loads(json.dumps(sample("h100-nvl").as_json()))

    assert found == {
        "node": "h100-nvl",
        "gpus": [0, 1, 2, 3],
        "islands": [[0, 1], [2, 3]],
        "max_tp": 2,
        "why": "GPUs 0-1 are an NVLink island of 2 (NV12)",
        "pairs": {
            "0-1": "NV12",
            "0-2": "SYS",
            "0-3": "SYS",
            "1-2": "SYS",
            "1-3": "SYS",
            "2-3": "NV12",
        },
        "tiers": {"SYS": [[0, 1, 2, 3]]},
        "models": {},
        "numa": {"0": 0, "1": 0, "2": 1, "3": 1},
        "nics": {"mlx5_0": {"0": "PHB", "1": "PHB", "2": "SYS", "3": "SYS"}},
        "nearest_nics": {
            "0": [{"nic": "mlx5_0", "class": "PHB"}],
            "1": [{"nic": "mlx5_0", "class": "PHB"}],
            "2": [{"nic": "mlx5_0", "class": "SYS"}],
            "3": [{"nic": "mlx5_0", "class": "SYS"}],
        },
        "warnings": list(sample("h100-nvl").warnings),
    }


def test_tiers_are_what_to_place_within():
    assert sample("l40s-pcie").tiers == {
        "PIX": ((0, 1), (2, 3), (4, 5), (6, 7)),
        "NODE": ((0, 1, 2, 3), (4, 5, 6, 7)),
        "SYS": (EIGHT,),
    }


@ANY_PACE
@given(st.data(), st.integers(0, 8))
def test_any_node_can_be_told(data, count):
    """Every GPU is on one island and in one group of each tier, and no check stumbles."""
    word = st.one_of(st.sampled_from(PCIE), st.integers(1, 18).map("NV{}".format))
    gpus = tuple(range(count))
    found = Interconnect(
        "n",
        gpus,
        {pair: data.draw(word) for pair in combinations(gpus, 2)},
        numa={gpu: data.draw(st.integers(0, 1)) for gpu in gpus if data.draw(st.booleans())},
        nics={"mlx5_0": {gpu: data.draw(st.sampled_from(PCIE)) for gpu in gpus}},
    )

    told = json.loads(json.dumps(found.as_json()))

    assert sorted(gpu for island in told["islands"] for gpu in island) == list(gpus)
    for groups in told["tiers"].values():
        assert sorted(gpu for group in groups for gpu in group) == list(gpus)
    assert all(isinstance(warning, str) for warning in told["warnings"])


@ANY_PACE
@given(st.sets(st.integers(0, 20)))
def test_short_numbers_mean_all_of_them(numbers):
    found = set()
    for part in filter(None, ranges(numbers).split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))

    assert found == numbers


@ANY_PACE
@given(st.lists(st.integers(1, 18), min_size=3, max_size=8))
def test_what_hangs_on_switches_is_told_from_what_is_wired(links):
    """Pairs as narrow as the narrower end: only the largest count cannot be told alone."""
    pairs = {(i, j): min(links[i], links[j]) for i, j in combinations(range(len(links)), 2)}

    found = switch_links(pairs)

    assert found is not None
    assert all(min(found[i], found[j]) == width for (i, j), width in pairs.items())
    assert switch_links(sample("dgx-1v").widths(range(4))) is None

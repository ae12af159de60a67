"""Which nodes may become GPU nodes, judged before one of them is touched."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from gpufleet.gpu_software.provisioning import read_provisioning
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.parse import parse_settings
from tests.conftest import NODES
from tests.support.rows import each_row

LOCK = {"driver": "580.95.05"}
REPOSITORY = {"url": "https://mirror.example.net/debian12/x86_64", "keyring_sha256": "0" * 64}


@dataclass
class Declared:
    settings: NodeSettings
    groups: tuple[str, ...] = ("gpu",)
    origins: dict[str, Any] = field(default_factory=dict)


def declared(**written) -> Declared:
    """Return a node's settings, with a repository unless they say otherwise."""
    cuda = {"repository": REPOSITORY, "toolkit": None}
    return Declared(parse_settings({"cuda": cuda, **written}))


def answer(**changed) -> dict[str, Any]:
    """Return what an HGX node with Debian 12 and no driver answers."""
    document = json.loads((NODES / "h100x8.json").read_text())
    absent = {"missing": "absent"}
    return document | {
        "os_release": {"id": "debian", "version_id": "12"},
        "driver": dict.fromkeys(document["driver"], absent) | {"kernels": absent},
        "gpus": [],
        **changed,
    }


def test_a_node_without_a_driver_is_a_node():
    found = read_provisioning({"gpu-01": answer()}, {"gpu-01": declared(gpu_lock=LOCK)})
    assert found.refused == ()
    assert len(found.nodes["gpu-01"].machine.gpus) == 8
    assert found.nodes["gpu-01"].machine.nvswitch


def test_a_node_without_a_lock_is_left_alone_whatever_it_answers():
    settings = {"gpu-01": declared(gpu_lock=LOCK), "own": declared()}
    found = read_provisioning({"gpu-01": answer(), "own": "no answer within 60 s"}, settings)
    assert found.refused == ()
    assert set(found.nodes) == {"gpu-01"}


def test_a_run_without_any_lock_is_refused():
    (said,) = read_provisioning({"own": answer()}, {"own": declared()}).refused
    assert "gpufleet lock" in said


def test_every_problem_of_every_node_is_said_at_once():
    settings = {
        name: declared(gpu_lock=LOCK, gpu={"rdma": {"way": "dma_buf"}})
        for name in ("dead", "odd", "old", "empty")
    }
    answers = {
        "dead": "cannot be reached: timed out",
        "odd": answer(os_release={"id": "gentoo", "version_id": "2"}),
        "old": answer(kernel="5.10.0-30-amd64"),
        "empty": answer(pci=[]),
    }
    found = read_provisioning(answers, settings)
    about = [said.partition(":")[0] for said in found.refused]
    assert about == ["dead", "odd", "old", "empty"]
    assert "timed out" in found.refused[0]
    assert "gentoo 2" in found.refused[1]
    assert "Linux 5.12" in found.refused[2]
    assert "no NVIDIA GPU" in found.refused[3]


def test_what_cannot_be_read_is_refused_and_never_guessed():
    unread = answer(os_release={"id": {"missing": "no_permission"}, "version_id": "12"})
    found = read_provisioning({"gpu-01": unread}, {"gpu-01": declared(gpu_lock=LOCK)})
    assert found.nodes == {}
    (said,) = found.refused
    assert "no_permission" in said


def test_another_systems_repository_is_refused():
    """The same packages exist there, made for other libraries."""
    url = "https://developer.download.nvidia.com/compute/cuda/repos/ubuntu2404/x86_64"
    cuda = {"repository": REPOSITORY | {"url": url}, "toolkit": None}
    settings = declared(gpu_lock=LOCK, cuda=cuda)
    (said,) = read_provisioning({"gpu-01": answer()}, {"gpu-01": settings}).refused
    assert "debian12/x86_64" in said


def test_a_lock_without_a_repository_is_refused():
    (said,) = read_provisioning(
        {"gpu-01": answer()}, {"gpu-01": declared(gpu_lock=LOCK, cuda=None)}
    ).refused
    assert "cuda.repository" in said


@each_row(
    ("secure_boot", "policy", "refused"),
    [
        ({"missing": "absent"}, "refuse", False),
        (False, "refuse", False),
        (True, "refuse", True),
        ({"missing": "no_permission"}, "refuse", True),
        (True, "enrolled", False),
    ],
)
def test_a_node_that_would_not_load_what_dkms_builds_is_refused(secure_boot, policy, refused):
    """Not known is as good as on: the node would boot without its GPUs."""
    bare = answer()
    bare["system"] = bare["system"] | {"secure_boot": secure_boot}
    settings = declared(gpu_lock=LOCK, gpu={"secure_boot": policy})
    said = read_provisioning({"gpu-01": bare}, {"gpu-01": settings}).refused
    assert bool(said) == refused
    assert all("Secure Boot" in each for each in said)

"""Provide the downloads of a lab's fleet: vendor packages, wheels and locks, a gated model.

Contract: `provide` converges, also after a killed run: all existing files stay. At the end,
`<state>/group_vars/lab.yml` has the addresses of all downloads. The mirror, which `Lab.up` has
started (lab/services.py), serves the downloads to the nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from lab import fake_hub, package_mirror, sglang_wheels, tiny_model, vendor, wheelhouse
from lab.progress import Say, silent, step
from lab.state import LabState, write

API_KEY = "secrets/api-key"
CLUSTER_KEY = "secrets/cluster-key"
HF_TOKEN = "secrets/hf-token"
MODEL = "lab/tiny"

# The CPU build of this release is on PyPI, requires the CPU build of torch, and has everything that
# the lab needs (measured).
VLLM = "0.32.0"


def provide(state: LabState, say: Say = silent, also: Sequence[str] = ()) -> None:
    """
    Provide all downloads of nodes, and write their addresses for the inventory.

    The first call on a machine downloads about 0.9 GB of wheels, and 0.2 GB for each additional
    release of vLLM in `also`. Each of these releases needs a lock file beside that of the first
    release. Raises FleetError.
    """
    with step("vendor repository", say):
        repository = vendor.build(state.dir, state.mirror_url)
    with step("model", say):
        files = tiny_model.write(state.dir / package_mirror.MODELS / MODEL)
    with step("wheels", say):
        wheelhouse.wheelhouse(versions=(VLLM, *also), report=say)
        lock, uv_lock = wheelhouse.write_locks(state.dir, version=VLLM)
        for version in also:
            wheelhouse.write_locks(state.dir, version=version)
    written: dict[str, Any] = {
        "cuda": {
            "repository": {
                "url": repository.url,
                "keyring": repository.keyring,
                "keyring_sha256": repository.keyring_sha256,
            },
            "toolkit": "13-0",
            "version": "13.0.3-1",
        },
        "vllm": {
            "version": VLLM,
            "lock": str(lock),
            "uv_lock": str(uv_lock),
            **_engine(state),
        },
    }
    head = f"# Written by the lab; the model's revision is {fake_hub.revision_of(files)}.\n"
    write(state.dir / "group_vars/lab.yml", head + yaml.safe_dump(written, sort_keys=False))


def sglang_settings(state: LabState, say: Say = silent) -> dict[str, Any]:
    """
    Provide SGLang's release after `provide`, and return the nodes' settings section `sglang`.

    The first call on a machine downloads about 0.25 GB of wheels, in addition to vLLM's. Raises
    FleetError.
    """
    with step("wheels of SGLang", say):
        sglang_wheels.sglang_wheels(report=say)
    return {
        "version": sglang_wheels.VERSION,
        "lock": str(sglang_wheels.write_lock(state.dir)),
        "uv_lock": str(state.dir / "locks/uv.txt"),
        **_engine(state),
    }


def _engine(state: LabState) -> dict[str, Any]:
    """Return the settings that are the same for each engine."""
    return {
        "device": "cpu",
        "no_index": True,
        "find_links": [f"{state.mirror_url}/wheels/"],
        "hf_endpoint": f"{state.mirror_url}/hub",
        "api_key_file": str(state.dir / API_KEY),
        "cluster_key_file": str(state.dir / CLUSTER_KEY),
        # Only nodes are on the lab's bridge. If a test needs other clients, the test creates them.
        "allow_unguarded_ports": True,
        "hf_token_file": str(state.dir / HF_TOKEN),
    }

"""A fleet of many small lab nodes that `deploys/vllm.py` has converged, in everything but vLLM.

    python -m benchmarks.converge.fleet NODES     # bring it up, or to another size; `down` ends it

The nodes are real (systemd, sshd, apt; simulated NVML), one T4 each. Every one has a replica of one
model: its unit, its release, its model and the proof that the release takes its flags lie where
they always do, but the release's `vllm` is server.py, which needs 12 MB. Compilers and the node
exporter come with the nodes' image, for `apt-get install` on so many nodes takes an hour of two
cores. Needs root.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from gpufleet.artifacts.release import Release, release
from gpufleet.fleet.facts_timer import TIMER
from gpufleet.serving.vllm_node import PACKAGES
from gpufleet.settings.serving_settings import Vllm
from lab.nodes import Lab
from lab.state import write
from tests.support.checkout import own_lab

ROOT = Path(__file__).parents[2]
LAB_ID = os.environ.get("GPUFLEET_BENCH_LAB") or own_lab("gfb")
# What comes with the nodes' image.
PACKED = (*PACKAGES, "prometheus-node-exporter")
VERSION = "0.32.0"
MODEL = "/srv/models/tiny"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
}
# A safetensors file without tensors: 8 bytes with the header's length, the header, then bytes that
# only make up the size that plans read.
WEIGHTS = (2).to_bytes(8, "little") + b"{}" + b"\0" * 4086


@dataclass(frozen=True)
class BenchFleet:
    """The nodes, and the directory of their inventory and variables."""

    lab: Lab
    project: Path
    nodes: tuple[str, ...]

    @property
    def inventory(self) -> str:
        """The inventory file that pyinfra is given."""
        return str(self.project / "inventories/lab.py")

    @property
    def environment(self) -> dict[str, str]:
        """The environment of commands about this fleet."""
        kept = {key: value for key, value in os.environ.items() if key not in _UNWANTED}
        return {**kept, "GPUFLEET_LAB": LAB_ID}

    def pyinfra(self, deploy: str, *arguments: str) -> str:
        """Run the command that an operator types; return what it printed. Raises on failure."""
        command = [sys.executable, "-m", "pyinfra", *arguments, self.inventory, deploy]
        return ran(command, self.environment)

    def addresses(self) -> Mapping[str, str]:
        """The address of each node's sshd."""
        return {node.name: str(node.address) for node in self.lab.facts.nodes}


# A shell's wish to write no bytecode would have every process compile this project anew.
_UNWANTED = ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH")


def ran(command: list[str], environment: Mapping[str, str]) -> str:
    """Run a command in the repository; return what it printed, raise with it on failure."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}")
    return done.stdout


def ready(count: int) -> BenchFleet:
    """Return a fleet of exactly so many nodes, converged; what is there already stays."""
    fleet = handed_over(count)
    fleet.pyinfra(str(Path(__file__).with_name("prepare.py")), "-y")
    fleet.pyinfra("deploys/vllm.py", "-y")
    return fleet


def handed_over(count: int) -> BenchFleet:
    """Return a fleet of exactly so many nodes that have release and model, and what they had."""
    lab = Lab.open(LAB_ID, print)
    names = tuple(f"gpu-{number:02}" for number in range(1, count + 1))
    lab.up(dict.fromkeys(names, "t4x1"), packages=PACKED)
    project = lab.state / "bench"
    build = _variables(project, lab.state, count)
    for name in names:
        _install(lab.root(name), build)
    return BenchFleet(lab, project, names)


def _variables(project: Path, state: Path, count: int) -> Release:
    """Write what an operator would; return the release that it names."""
    shutil.rmtree(project, ignore_errors=True)
    shutil.copytree(ROOT / "inventories", project / "inventories")
    vllm = {
        "version": VERSION,
        "device": "cpu",
        "lock": str(ROOT / f"locks/vllm-{VERSION}.txt"),
        "uv_lock": str(ROOT / "locks/uv.txt"),
        "api_key_file": str(state / "secrets/api-key"),
    }
    served = {"model": MODEL, "tensor_parallel": 1, "replicas": count, "drain_seconds": 1}
    variables = {
        "gpus": {"count": 1},
        "node_exporter": {"port": 9100},
        "vllm": vllm,
        "serving": {"tiny": served},
    }
    write(project / "group_vars/lab.yml", yaml.safe_dump(variables, sort_keys=False))
    wanted = Vllm.model_validate(vllm)
    return release(wanted, Path(wanted.lock).read_bytes(), Path(wanted.uv_lock).read_bytes())


def _install(root: Path, build: Release) -> None:
    """Put a model, and what stands for a release of vLLM, into the root of a node."""
    # Facts are read every minute, on every node: of 64 nodes on two cores a fifth of the time.
    rare = "[Timer]\nOnUnitActiveSec=\nOnUnitActiveSec=1d\n"
    write(root / f"usr/lib/systemd/system/{TIMER}.d/rare.conf", rare)
    home = root / build.directory.lstrip("/")
    write(home / "bin/vllm", Path(__file__).with_name("server.py").read_text(), 0o755)
    package = home / f"lib/python3.11/site-packages/vllm-{VERSION}.dist-info"
    write(package / "METADATA", f"Name: vllm\nVersion: {VERSION}\n")
    write(root / build.mark.lstrip("/"), "")
    model = root / MODEL.lstrip("/")
    write(model / "config.json", json.dumps(CONFIG))
    if not (model / "model.safetensors").exists():
        (model / "model.safetensors").write_bytes(WEIGHTS)


def main() -> None:
    """Bring the fleet up, or end it."""
    if sys.argv[1] == "down":
        Lab.open(LAB_ID, print).purge()
        return
    print("converged:", len(ready(int(sys.argv[1])).nodes), "nodes")


if __name__ == "__main__":
    main()

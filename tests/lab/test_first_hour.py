"""From a wheel and two bare nodes to a completion of both, as a new user types it.

In an empty directory that has only the wheel, with an empty environment but for the way to an index
of packages, and a home of its own; the checkout is not on the path. docs/configure/first-hour.md
shows the same lines.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from lab import provisioning_sources
from lab.nodes import Lab
from lab.state import LabState
from tests.support.checkout import ROOT, own_lab
from tests.support.wheel import build_wheel

LAB_ID = own_lab("gffh")
NODES = ("gpu-01", "gpu-02")
pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
PAGE = ROOT / "docs/configure/first-hour.md"
INDEX = re.compile(r"PIP_|https?_proxy$|no_proxy$", re.IGNORECASE)
"""Variables by which pip reaches an index here."""


@dataclass
class NewUser:
    """A shell in which lines are typed one after the other."""

    home: Path
    state: LabState
    here: Path = field(init=False)
    typed: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.here = self.home

    def type(self, line: str) -> str:
        """Type a line; return what it printed. Fails where it does."""
        self.typed.append(line)
        began = time.monotonic()
        done = subprocess.run(
            ["bash", "-c", f"{line} && pwd > {shlex.quote(str(self.home / 'here'))}"],
            cwd=self.here,
            env={
                "HOME": str(self.home),
                "PATH": f"{self.home}/.venv/bin:/usr/sbin:/usr/bin:/sbin:/bin",
                "LANG": "C.UTF-8",
                **{name: os.environ[name] for name in os.environ if INDEX.match(name)},
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=1500,
        )
        self.seconds.append(time.monotonic() - began)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        self.here = Path((self.home / "here").read_text().strip())
        return done.stdout + done.stderr

    def ssh(self, node: str, command: str) -> str:
        """Return what a command prints on a node."""
        return subprocess.run(
            ["ssh", "-F", self.state.ssh_config, node, command],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NewUser]:
    """
    A new user of the lab's two bare nodes, who can log in there, in a directory with the wheel.

    Of the lab they have what an operator has of a site: the names in ~/.ssh/config, and a file of
    settings for its mirror, vLLM's build for CPUs and the model that is there.
    """
    lab = Lab.open(LAB_ID, print)
    keep = bool(os.environ.get("GPUFLEET_KEEP_LAB"))
    if not keep:
        lab.purge()
    lab.up(dict.fromkeys(NODES, "t4x1"), without_driver=NODES)
    state = LabState.load(LAB_ID)
    provisioning_sources.provide(state, print)
    home = tmp_path_factory.mktemp("home")
    (home / ".ssh").mkdir(mode=0o700)
    (home / ".ssh/config").write_text(state.ssh_config.read_text())
    (home / "site.yml").write_text(yaml.safe_dump(site(state), sort_keys=False))
    shutil.copy(build_wheel(tmp_path_factory.mktemp("dist")), home)
    yield NewUser(home, state)
    if not keep:
        lab.purge()


def site(state: LabState) -> dict[str, object]:
    """Return what the lab and group_vars/lab.yml have, without keys: `init` makes its own."""
    written = yaml.safe_load((state.dir / "group_vars/lab.yml").read_text())
    for key in ("api_key_file", "cluster_key_file"):
        del written["vllm"][key]
    model = yaml.safe_load((ROOT / "group_vars/lab.yml").read_text())["serving"]
    model["tiny"]["tensor_parallel"] = 1
    return written | {"serving": model}


def test_ten_lines_lead_from_bare_nodes_to_a_completion_of_both(user: NewUser) -> None:
    user.type("python3 -m venv .venv && . .venv/bin/activate")
    user.type("pip install gpufleet-*.whl")
    said = user.type("gpufleet init fleet gpu-01 gpu-02 --settings site.yml --yes")
    # The keys that are shown are those of the nodes.
    for node in user.state.nodes:
        key = user.state.dir / f"nodes/{node.name}/root/etc/ssh/ssh_host_ed25519_key.pub"
        listed = subprocess.run(
            ["ssh-keygen", "-lf", key], capture_output=True, text=True, check=True, timeout=10
        ).stdout
        assert listed.split()[1] in said
    assert "no NVIDIA driver is loaded: run `gpufleet deploy node` first," in said

    user.type("cd fleet")
    user.type("""gpufleet deploy node -y --data 'gpu={"reboot": "when_needed"}'""")
    user.type("gpufleet plan")
    user.type("gpufleet deploy vllm -y")
    key = (user.here / "secrets/vllm-api-key").read_text().strip()
    for node in user.state.nodes:
        answer = user.type(
            "sed 's/^/Authorization: Bearer /' secrets/vllm-api-key | curl -sS --fail -H @- "
            "-H 'Content-Type: application/json' "
            """-d '{"model": "tiny", "prompt": "Hello", "max_tokens": 8}' """
            f"http://{node.address}:8000/v1/completions"
        )
        assert json.loads(answer)["usage"]["completion_tokens"] == 8
    assert key not in said

    for line, seconds in zip(user.typed, user.seconds, strict=True):
        print(f"{seconds:6.0f} s  {line}")
    assert len(user.typed) <= 10


def test_a_second_init_changes_nothing_and_asks_for_no_key(user: NewUser) -> None:
    fleet = user.home / "fleet"
    before = {path: path.read_bytes() for path in fleet.rglob("*") if path.is_file()}

    said = user.type("cd .. && gpufleet init fleet gpu-01 gpu-02 --settings site.yml && cd fleet")

    assert "SHA256:" not in said
    assert "written" not in said
    kept = {path: path.read_bytes() for path in fleet.rglob("*") if path.is_file()}
    assert {path: kept.get(path) for path in before} == before


def test_hosts_that_do_not_answer_are_refused_together_and_nothing_is_written(
    user: NewUser,
) -> None:
    with pytest.raises(AssertionError) as failed:
        user.type("gpufleet init other nowhere.invalid 127.0.0.1:1 --yes")

    lines = re.findall(r"^ *error: .*", str(failed.value), re.MULTILINE)
    assert len(lines) == 2
    assert all("gpufleet could not get the host key:" in line for line in lines)
    assert "Traceback" not in str(failed.value)
    assert not (user.here / "other").exists()


def test_the_page_shows_these_lines(user: NewUser) -> None:
    page = PAGE.read_text()
    for line in (
        "python3 -m venv .venv && . .venv/bin/activate",
        "pip install gpufleet-*.whl",
        "gpufleet init fleet gpu-01 gpu-02",
        "gpufleet deploy node",
        "gpufleet deploy vllm",
    ):
        assert line in page


# What may stay: models, and what belongs to the driver.
KEPT = ("/var/lib/vllm/models", "/etc/modprobe.d/", "/etc/modules-load.d/", "/etc/apt/apt.conf.d/")
LOOK = (
    "find / -xdev -path /proc -prune -o -path /sys -prune -o -path '*gpufleet-lab*' -prune -o "
    "\\( -name '*gpufleet*' -o -name '*vllm*' \\) -print"
)


def test_absent_takes_all_that_was_brought_and_leaves_drivers_and_models(user: NewUser) -> None:
    """Read with find, dpkg and systemctl, on the nodes."""
    named = user.type("gpufleet deploy absent --dry")
    assert "stop and remove unit vllm-tiny-0.service" in named
    assert "remove account vllm" in named
    models = {node: user.ssh(node, "du -sb /var/lib/vllm/models") for node in NODES}
    assert user.ssh("gpu-01", "systemctl is-active vllm-tiny-0.service").strip() == "active"

    user.type("gpufleet deploy absent -y")

    for node in NODES:
        left = [
            path
            for path in user.ssh(node, LOOK).splitlines()
            if not path.startswith(KEPT)
            and path not in {"/var/lib/vllm", *(str(each) for each in Path(KEPT[0]).parents)}
            and "nvidia-persistenced.service.d" not in path
        ]
        assert left == []
        assert user.ssh(node, "du -sb /var/lib/vllm/models") == models[node]
        units = user.ssh(node, "systemctl list-units --all --plain --no-legend 'vllm*' 'gpufleet*'")
        assert "loaded" not in units
        assert user.ssh(node, "getent passwd vllm || echo none").strip() == "none"
        packages = user.ssh(node, "dpkg-query -W -f '${Package} ${db:Status-Status}\\n'")
        assert "prometheus-node-exporter installed" not in packages
        assert "datacenter-gpu-manager-exporter installed" not in packages
        assert "nvidia-driver-cuda installed" in packages
        assert user.ssh(node, "nft list tables 2>/dev/null || true").strip() == ""


def test_a_second_removal_changes_nothing(user: NewUser) -> None:
    before = {
        node: user.ssh(node, "find /etc /opt /usr/local /var/lib -xdev | sort") for node in NODES
    }

    said = user.type("gpufleet deploy absent -y")

    assert "stop and remove" not in said
    assert {
        node: user.ssh(node, "find /etc /opt /usr/local /var/lib -xdev | sort") for node in NODES
    } == before


def test_deploys_bring_everything_again(user: NewUser) -> None:
    user.type("gpufleet deploy node -y")
    user.type("gpufleet deploy vllm -y")

    assert "2 of 2 replicas serve" in user.type("gpufleet status")


def test_pyinfra_itself_runs_the_deploys_that_init_wrote(user: NewUser) -> None:
    look = "systemctl show -p MainPID vllm-tiny-0.service"
    before = user.ssh("gpu-01", look)

    said = user.type("pyinfra -y inventories/fleet.py deploys/vllm.py")

    assert "deploys/vllm.py" in said
    assert user.ssh("gpu-01", look) == before

"""Four nodes that serve one model behind a gateway, and what tests do with them under load.

A replica takes one GPU, and a node has one that is not reserved: so a node is a replica. What the
project declares is one file, `group_vars/up.yml`, as an operator would have it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from lab import fake_hub, package_mirror, provisioning_sources, services, wheelhouse
from lab.nodes import Lab
from lab.state import LabState, write
from tests.lab import made_release
from tests.lab.conftest import Fleet
from tests.lab.upgrade_load import Clients, clients
from tests.support.checkout import ROOT

PROFILE = "h100x2-nvl"
NODES = ("gpu-01", "gpu-02", "gpu-03", "gpu-04")
GATEWAY = "mon-05"
PORT = 8443
OLD, NEW = wheelhouse.OLDER, provisioning_sources.VLLM
# Requests a second. Four servers and their clients on two cores: more of them, and what is measured
# while a model loads is this machine.
RATE = 4.0
# Of Prometheus, on the gateway's node: three samples within the shortest of the gates' times.
SCRAPE_SECONDS = 5
RELEASES = "opt/vllm/releases"

INVENTORY = '''\
"""The lab's nodes, and the one without GPUs as the gateway in front of them, and their watch."""

from gpufleet import inventory
from lab.inventory import MONITORING, groups

_groups = groups()
_groups["gateway"] = [(name, dict(facts)) for name, facts in _groups[MONITORING]]
_gpu = [name for name in _groups if name not in ("gateway", MONITORING)]

globals().update(inventory.load(__file__, groups=_groups, children={"gpu": _gpu}))
'''

FLAGS = {
    "kv-cache-memory-bytes": "64M",
    "enforce-eager": True,
    "max-model-len": 512,
    "max-num-seqs": 8,
    "max-num-batched-tokens": 512,
}
# On two cores that also load a model, latencies of seconds are this machine's: the tests' own
# ratio. The default is 1.5.
GATES = {
    # A replica of four gets one request a second: enough of them for a verdict.
    "soak_seconds": 25,
    "baseline_seconds": 25,
    "latency_ratio": 10.0,
    "latency_least_requests": 15,
    # For most tests: what is broken on purpose here brings alerts of its own.
    "alerts": False,
}


@dataclass
class UpgradeFleet(Fleet):
    """The lab and its project. `declare` writes what is wanted, `upgrade` brings it about."""

    key_of_clients: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    wanted: dict[str, Any] = field(default_factory=dict)
    first: str = OLD
    """The release that is declared at first."""
    begun: float = 0.0
    """When the last command was begun, as time.time()."""
    running: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    """The last command that was begun."""

    @property
    def inventory(self) -> str:
        return str(self.project / "inventories/up.py")

    @property
    def gpu_nodes(self) -> tuple[str, ...]:
        return tuple(node.name for node in self.state.nodes if node.name != GATEWAY)

    @property
    def url(self) -> str:
        """The gateway, as clients have it."""
        return f"http://{self.address(GATEWAY)}:{PORT}/v1"

    @property
    def trusted(self) -> Path | None:
        """The certificate that clients of the gateway trust; None where it shows none."""
        return None

    # -- what is declared ----------------------------------------------------------------------

    def transport(self) -> dict[str, Any]:
        """Return the gateway's settings by which clients reach it: here plain HTTP."""
        return {"allow_plain_http": True}

    def lay_out(self) -> None:
        """Write the project: inventory, locks, variables."""
        for folder in ("inventories", "group_vars", "locks"):
            (self.project / folder).mkdir(exist_ok=True)
        write(self.project / "inventories/up.py", INVENTORY)
        for lock in (self.state.dir / "locks").glob("*.txt"):
            shutil.copy(lock, self.project / "locks" / lock.name)
        sha256 = hashlib.sha256(self.key_of_clients.encode()).hexdigest()
        gateway = {
            "port": PORT,
            **self.transport(),
            "clients": [{"name": "load", "key_sha256": sha256}],
        }
        self._write("gateway.yml", {"gpu_node": False, "gateway": gateway})
        watch = {"prometheus": {"scrape_seconds": SCRAPE_SECONDS}}
        self._write("monitoring.yml", {"gpu_node": False, "monitoring": watch})
        provided = yaml.safe_load((self.state.dir / "group_vars/lab.yml").read_text())
        self.wanted = {
            "gpus": {"reserved": [1]},
            "vllm": {
                **provided["vllm"],
                "version": self.first,
                "lock": self.lock(self.first),
                "uv_lock": str(self.project / "locks/uv.txt"),
                # However often they change, a release that was built is not built again
                "keep_releases": 12,
            },
            "serving": {
                "tiny": {
                    "model": provisioning_sources.MODEL,
                    "revision": self.revision(),
                    "tensor_parallel": 1,
                    "replicas": len(self.gpu_nodes),
                    "start_seconds": 600,
                    "drain_seconds": 60,
                    "flags": dict(FLAGS),
                }
            },
            "upgrade": {"gates": dict(GATES)},
        }
        self.declare()

    def declare(self, **changes: Mapping[str, Any]) -> None:
        """Change keys below top-level ones, `declare(vllm={"version": ...})`, and write all."""
        for key, values in changes.items():
            self.wanted[key] = {**self.wanted.get(key, {}), **values}
        self._write("up.yml", self.wanted)

    def declare_model(self, **values: Any) -> None:
        """Change keys of the model."""
        self.declare(serving={"tiny": {**self.wanted["serving"]["tiny"], **values}})

    def declare_release(self, version: str) -> None:
        self.declare(vllm={"version": version, "lock": self.lock(version)})

    def lock(self, version: str) -> str:
        return str(self.project / f"locks/vllm-{version}.txt")

    def declare_driver(self, driver: str, dcgm: Mapping[str, str]) -> None:
        """Have the nodes run this driver; a reboot is allowed where it takes one."""
        provided = yaml.safe_load((self.state.dir / "group_vars/lab.yml").read_text())
        self.declare(
            cuda={"repository": provided["cuda"]["repository"]},
            gpu_lock={"driver": driver, "dcgm": dict(dcgm)},
            gpu={"reboot": "when_needed", "reboot_seconds": 120},
        )

    def declared(self) -> dict[str, Any]:
        """Return what the file says now: `--vllm` writes it too."""
        found: dict[str, Any] = yaml.safe_load((self.project / "group_vars/up.yml").read_text())
        return found

    def _write(self, name: str, values: Mapping[str, Any]) -> None:
        (self.project / "group_vars" / name).write_text(
            yaml.safe_dump(dict(values), sort_keys=False)
        )

    def revision(self) -> str:
        """Return the revision of the model that the lab's hub has now."""
        return fake_hub.revision_of(self._model)

    def change_model(self, text: str) -> str:
        """Give the hub another revision, with the same weights; the old one is gone from it."""
        write(self._model / "README.md", text)
        return self.revision()

    @property
    def _model(self) -> Path:
        return self.state.dir / package_mirror.MODELS / provisioning_sources.MODEL

    def offer(self, version: str, change: made_release.Change) -> None:
        """Have nodes find a release that nobody published, and the project its lock."""
        folder = self.project / "made"
        folder.mkdir(exist_ok=True)
        self.offer_wheels(*made_release.make(folder, version, change))

    def offer_wheels(self, made: Iterable[Path], lock: Path) -> None:
        """Have nodes find wheels that are not the lab's, and the project their lock."""
        shutil.copy(lock, self.project / "locks" / lock.name)
        for node in self.gpu_nodes:
            there = self.lab.root(node) / made_release.ON_NODE.lstrip("/")
            there.mkdir(parents=True, exist_ok=True)
            for wheel in made:
                shutil.copy(wheel, there / wheel.name)
        links = self.wanted["vllm"]["find_links"]
        if made_release.ON_NODE not in links:
            self.declare(vllm={"find_links": [*links, made_release.ON_NODE]})

    def bring(self, *versions: str, refused: bool = False) -> None:
        """
        Have all nodes hold releases before any test changes to them; `refused`: whose parser says
        no to what is declared, which it is asked once it is built.

        The first node builds each as any node does. The others get copies of its files, for what
        takes two cores minutes a node is proven by other tests. A release that is there stays.
        """
        declared = {key: self.wanted["vllm"][key] for key in ("version", "lock")}
        first, *others = self.gpu_nodes
        for version in versions:
            self.declare_release(version)
            run = self.pyinfra("-y", "--limit", first, deploy="deploys/prepare.py", seconds=1800)
            assert (run.status != 0) is refused, run.output
        built = self.lab.root(first) / RELEASES
        for release in (each for each in built.iterdir() if each.name.split("-")[0] in versions):
            for node in others:
                there = self.lab.root(node) / RELEASES
                there.mkdir(parents=True, exist_ok=True)
                if not (there / release.name).exists():
                    spread(release, there)
        self.declare(vllm=declared)

    # -- what is done --------------------------------------------------------------------------

    def deploy(self) -> None:
        """Bring fleet, gateway and monitoring up, as the first time."""
        for deploy in ("deploys/vllm.py", "deploys/gateway.py", "deploys/monitoring.py"):
            run = self.pyinfra("-y", deploy=deploy, seconds=1800)
            assert run.status == 0, run.output

    def upgrade(self, *arguments: str, seconds: int = 3000) -> subprocess.CompletedProcess[str]:
        """Run `gpufleet upgrade` to its end, as an operator who wants no questions."""
        process = self.begin("upgrade", *arguments)
        try:
            status = process.wait(timeout=seconds)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        return subprocess.CompletedProcess(arguments, status, self.said(), "")

    def begin(self, verb: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start `gpufleet VERB INVENTORY --yes ...` and return at once; it writes to `log`."""
        gpufleet = str(Path(sys.executable).with_name("gpufleet"))
        self.begun = time.time()
        with self.log.open("wb") as output:
            self.running = subprocess.Popen(
                [gpufleet, verb, self.inventory, "--yes", *arguments],
                cwd=ROOT,
                env=self.env(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                # A shell that runs the tests in the background has them ignore Ctrl-C.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
            )
        return self.running

    def said(self) -> str:
        """Return what the last command printed, without colours."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.log.read_text(errors="replace"))

    # -- what became of it, by other roads than the code under test takes ----------------------

    def journal(self) -> list[dict[str, Any]]:
        """Return the entries of the newest journal as they lie on the disk."""
        files = sorted(self.project.glob(".gpufleet/upgrades/*.jsonl"))
        if not files:
            return []
        return [json.loads(line) for line in files[-1].read_text().split("\n")[:-1]]

    def unfinished(self) -> bool:
        """Tell whether the newest journal is of an upgrade that is not at its end."""
        found = {entry["what"] for entry in self.journal()}
        return bool(found) and not found & {"finished", "stopped"}

    def noted(self, what: str) -> list[dict[str, Any]]:
        """Return the entries called so of the command that was begun last."""
        return [
            entry for entry in self.journal() if entry["what"] == what and entry["at"] >= self.begun
        ]

    def await_entry(
        self, process: subprocess.Popen[bytes], what: str, *, count: int = 1, seconds: float = 1500
    ) -> dict[str, Any]:
        """Wait until the running upgrade has announced `what` so many times; return the last."""
        deadline = time.monotonic() + seconds
        while True:
            found = self.noted(what)
            if len(found) >= count:
                return found[count - 1]
            over = process.poll() is not None
            assert not over, f"it ended without {what!r}: {self.said()[-3000:]}"
            assert time.monotonic() < deadline, f"no {what!r}: {self.said()[-3000:]}"
            time.sleep(0.1)

    def releases(self) -> dict[str, str]:
        """Return the release that each node's server runs from, by its process; "" if none."""
        found = {}
        command = (
            "pid=$(systemctl show -P MainPID vllm-tiny-*.service 2>/dev/null | grep -v '^$'"
            " | head -1); tr '\\0' '\\n' < /proc/${pid:-0}/cmdline 2>/dev/null"
            " | grep -o '/opt/vllm/releases/[^/]*' | head -1; :"
        )
        for node in self.gpu_nodes:
            where = self.ssh(node, command).strip()
            found[node] = where.rpartition("/")[2].partition("-")[0]
        return found

    def drained(self) -> dict[str, list[str]]:
        """Return the marks on each node: drained replicas, and `cordon` for a cordoned one."""
        command = (
            "cd /var/lib/gpufleet/change 2>/dev/null && for mark in drained/*.json cordon.json;"
            " do test -e $mark && basename $mark .json; done; :"
        )
        return {node: self.ssh(node, command).split() for node in self.gpu_nodes}

    def locked(self) -> list[str]:
        """Return the nodes that somebody has locked."""
        lock = "test -e /var/lib/gpufleet/change/lock.json && echo locked; :"
        return [node for node in self.gpu_nodes if self.ssh(node, lock).strip()]

    def serves(self, version: str) -> None:
        """Assert that all nodes serve from one release, with nothing drained and nobody's lock."""
        assert set(self.releases().values()) == {version}, self.releases()
        assert not any(self.drained().values()), self.drained()
        assert not self.locked()

    def changes_nothing(self) -> None:
        """Assert that a deploy has no unit to change."""
        run = self.pyinfra("-y", "--json", seconds=900)
        assert run.status == 0, run.output
        units = {name: nodes for name, nodes in run.changed.items() if "unit" in name.lower()}
        assert not units, units

    def given_up(self) -> None:
        """
        Forget every upgrade that is not at its end, by force, and lift what it has marked.

        For the tests that follow one that failed. The fleet may be anything between two releases.
        """
        if self.running and self.running.poll() is None:
            os.killpg(self.running.pid, signal.SIGKILL)
            self.running.wait(timeout=30)
        journals = self.project / ".gpufleet/upgrades"
        if journals.is_dir():
            journals.rename(journals.with_name(f"given-up-{time.time():.0f}"))
        change = "/var/lib/gpufleet/change"
        for node in (*self.gpu_nodes, GATEWAY):
            marks = f"{change}/lock.json {change}/cordon.json {change}/drained/*"
            self.ssh(node, f"rm -f {marks}")
        drained = "/var/lib/gpufleet/gateway/drained.json"
        again = f"rm -f {drained} && systemctl restart gpufleet-gateway"
        self.ssh(GATEWAY, f"if grep -q / {drained} 2>/dev/null; then {again}; fi")

    @contextmanager
    def load(self, name: str, rate: float = RATE) -> Iterator[Clients]:
        """Have clients ask the gateway while this lasts."""
        out = self.project / f"{name}.jsonl"
        out.unlink(missing_ok=True)
        with clients(
            self.url, self.key_of_clients, out, rate=rate, trusted=self.trusted
        ) as running:
            yield running

    def stop_mirror(self) -> None:
        """Take away what nodes download from; `start_mirror` brings it back."""
        services.stop(self.state)

    def start_mirror(self) -> None:
        services.start(self.state)


def spread(release: Path, to: Path) -> None:
    """Copy a release; what it shares by links with releases that `to` has, too, is linked there."""
    shared = {}
    for other in release.parent.iterdir():
        if other != release and (to / other.name).is_dir():
            for file in other.rglob("*"):
                if file.stat(follow_symlinks=False).st_nlink > 1 and file.is_file():
                    shared[file.stat(follow_symlinks=False).st_ino] = to / file.relative_to(
                        release.parent
                    )

    def linked(source: str, target: str) -> None:
        there = shared.get(Path(source).stat(follow_symlinks=False).st_ino)
        if there and there.exists():
            os.link(there, target, follow_symlinks=False)
        else:
            shutil.copy2(source, target, follow_symlinks=False)

    part = to / f"{release.name}.part"
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(release, part, symlinks=True, copy_function=linked)
    part.rename(to / release.name)


AnyFleet = TypeVar("AnyFleet", bound=UpgradeFleet)


@contextmanager
def upgrade_fleet(
    lab_id: str,
    project: Path,
    nodes: Sequence[str] = NODES,
    *,
    bare: bool = False,
    also: Sequence[str] = (OLD,),
    kind: type[AnyFleet] = UpgradeFleet,  # type: ignore[assignment]
) -> Iterator[AnyFleet]:
    """
    Give a lab of GPU nodes and a gateway, everything to download at hand, nothing deployed.

    `bare`: the nodes come without a driver. `also`: releases of vLLM to be at hand beside the
    newest one. It is gone afterwards; GPUFLEET_KEEP_LAB keeps it.
    """
    lab = Lab.open(lab_id, print)
    keep = bool(os.environ.get("GPUFLEET_KEEP_LAB"))
    if not keep:
        lab.purge()  # what a killed run left
    lab.up({**dict.fromkeys(nodes, PROFILE), GATEWAY: "none"}, without_driver=nodes if bare else ())
    provisioning_sources.provide(LabState.load(lab_id), print, also=also)
    found = kind(Lab.open(lab_id, print), project)
    found.lay_out()
    yield found
    if not keep:
        lab.purge()

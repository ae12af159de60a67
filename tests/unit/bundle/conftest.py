"""A fleet that is bundled: what it would download from, all on the loopback."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpufleet.bundle import serve
from gpufleet.cli.bundle_command import bundle
from lab import fake_hub, package_mirror, tiny_model, vendor, wheelhouse
from lab.vendor.deb import Package
from tests.support.checkout import ROOT
from tests.unit.bundle import archives

MODEL = "lab/tiny"
TOKEN = "hf_only-for-this-test"
DRIVER = "580.95.05"
KERNEL = "6.1.0-40-amd64"

# What the roles name and what the vendor's packages depend on, as a distribution has it.
DISTRIBUTION = (
    Package("ca-certificates", "1-1", fields={"Depends": "openssl"}),
    Package("openssl", "3-1"),
    *(
        Package(name, "1-1")
        for name in (
            "curl",
            "dbus",
            "dkms",
            "g++",
            "libnuma1",
            "passwd",
            "prometheus-node-exporter",
            "python3-dev",
            "python3-venv",
            "nftables",
            f"linux-headers-{KERNEL}",
        )
    ),
    Package("python3", "3.11-1", fields={"Depends": "libc6"}),
    Package("libc6", "2.36-9"),
    Package("libc6", "2.36-8"),
    Package("nothing-needs-me", "1-1"),
)

needs_apt = pytest.mark.skipif(
    not all(map(shutil.which, (*vendor.TOOLS, "apt-get"))),
    reason="making and reading apt archives needs apt, dpkg-dev and gnupg",
)


@contextmanager
def running(server: ThreadingHTTPServer) -> Iterator[str]:
    """Serve on the loopback; give the address."""
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


@dataclass(frozen=True)
class Fleet:
    """A project with one node, and the bundle that was made of it."""

    project: Path
    bundle: Path
    written: dict[str, Any]

    @property
    def inventory(self) -> str:
        return str(self.project / "inventories/far.py")

    def write(self, **changed: Any) -> None:
        text = yaml.safe_dump({**self.written, **changed})
        (self.project / "group_vars/far.yml").write_text(text)

    def make(self, *arguments: str, into: Path | None = None, nodes: Path | None = None) -> None:
        """Run `gpufleet bundle`."""
        probes = str(nodes or self.project / "probes.json")
        words = [self.inventory, "-o", str(into or self.bundle), "--nodes", probes, *arguments]
        bundle.main(words, standalone_mode=False)

    def lines(self) -> dict[str, str]:
        """Return the manifest, {path: hash}."""
        text = (self.bundle / "MANIFEST").read_text()
        return {path: digest for digest, path in (line.split("  ") for line in text.splitlines())}


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """The node of a lab's kind, everything it needs, and its bundle, made once."""
    if not all(map(shutil.which, (*vendor.TOOLS, "apt-get"))):
        pytest.skip("making and reading apt archives needs apt, dpkg-dev and gnupg")
    base = tmp_path_factory.mktemp("bundle")
    state, cache = base / "state", base / "cache"
    (state / "secrets").mkdir(parents=True)
    (state / package_mirror.TOKEN).write_text(TOKEN + "\n")
    revision = fake_hub.revision_of(tiny_model.write(state / package_mirror.MODELS / MODEL))
    locks = _wheels(cache / "wheels", base)
    key = archives.distribution(base / "www/debian", DISTRIBUTION, base / "keys")
    with (
        running(package_mirror.server(state, ("127.0.0.1", 0), cache)) as origin,
        running(serve.bind_server(base / "www", ("127.0.0.1", 0))) as debian,
    ):
        repository = vendor.build(state, origin)
        written = {
            "cuda": {
                "repository": {
                    # Another host than the distribution's, as the vendor's is.
                    "url": repository.url.replace("127.0.0.1", "localhost"),
                    "keyring": repository.keyring,
                    "keyring_sha256": repository.keyring_sha256,
                }
            },
            "gpu_lock": {
                "driver": DRIVER,
                "toolkit": {"profile": "full", "branch": "13-0", "version": "13.0.3-1"},
                "dcgm": {"version": "1:4.5.3-1", "exporter": "4.8.2-1"},
            },
            "vllm": {
                "version": "0.32.0",
                "lock": str(locks / "vllm.txt"),
                "uv_lock": str(locks / "uv.txt"),
                "listen": "127.0.0.1",
                "device": "cpu",
                "no_index": True,
                "find_links": [f"{origin}/wheels/"],
                "hf_endpoint": f"{origin}/hub",
                "hf_token_file": str(state / package_mirror.TOKEN),
            },
            "serving": {"tiny": {"model": MODEL, "revision": revision}},
            "mirror": {
                "url": "http://mirror.lan:8080",
                "archives": [
                    {
                        "url": f"{debian}/debian",
                        "suites": ["bookworm"],
                        "key_file": str(key),
                    }
                ],
            },
            "offline": True,
        }
        made = Fleet(_project(base / "project"), base / "out", written)
        made.write()
        made.make()
        yield made


def _project(project: Path) -> Path:
    (project / "inventories").mkdir(parents=True)
    (project / "group_vars").mkdir()
    (project / "inventories/far.py").write_text(
        "from gpufleet import inventory\n\n"
        'globals().update(inventory.load(__file__, groups={"far_gpus": ["gpu-01"]}))\n'
    )
    probe = json.loads((ROOT / "src/gpufleet/catalog/data/nodes/h100x8.json").read_text())
    probe["os_release"] = {"id": "debian", "version_id": "12"}
    probe["python"] = "3.11.2"
    probe["kernel"] = KERNEL
    probe["driver"]["kernels"] = [{"kernel": KERNEL, "running": True, "newest": True, "nvidia": {}}]
    (project / "probes.json").write_text(json.dumps({"gpu-01": probe}))
    return project


def _wheels(house: Path, base: Path) -> Path:
    """Write a small wheelhouse: what is pure, and what is made for one Python and one libc."""
    house.mkdir(parents=True)
    made = [
        wheelhouse.write_wheel(house, "vllm", "0.32.0", requires=["torch==2.9.0"]),
        wheelhouse.write_wheel(house, "uv", "0.13.9"),
        *(
            _tagged(wheelhouse.write_wheel(house, "torch", "2.9.0"), tags)
            for tags in (
                "cp311-cp311-manylinux_2_28_x86_64",
                "cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64",
                "cp311-cp311-manylinux_2_39_x86_64",
                "cp312-cp312-manylinux_2_28_x86_64",
                "cp311-cp311-manylinux_2_28_aarch64",
            )
        ),
    ]
    files = {path.name: {"sha256": _sha256(path), "size": path.stat().st_size} for path in made}
    (house / wheelhouse.MANIFEST).write_text(json.dumps({"requirements": [], "files": files}))
    locks = base / "locks"
    locks.mkdir()
    (locks / "vllm.txt").write_text(
        f"vllm==0.32.0 \\\n    --hash=sha256:{_sha256(made[0])}\n"
        "torch==2.9.0 \\\n"
        + " \\\n".join(f"    --hash=sha256:{_sha256(path)}" for path in made[2:])
        + "\n    # via vllm\n"
        'pywin32==311 ; sys_platform == "win32" \\\n    --hash=sha256:' + "0" * 64 + "\n"
    )
    (locks / "uv.txt").write_text(f"uv==0.13.9 --hash=sha256:{_sha256(made[1])}\n")
    return locks


def _tagged(wheel: Path, tags: str) -> Path:
    """Give a wheel other tags; its content tells it from its siblings."""
    name = wheel.name.replace("py3-none-any", tags)
    content = wheel.read_bytes()
    other = wheel.with_name(name)
    # A ZIP archive may have a comment at its end, of the length that its last two bytes say.
    other.write_bytes(content[:-2] + len(tags).to_bytes(2, "little") + tags.encode())
    wheel.unlink()
    return other


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def mirrored(fleet: Fleet) -> Iterator[str]:
    """The bundle, served as its README says; the address."""
    with running(serve.bind_server(fleet.bundle, ("127.0.0.1", 0))) as url:
        yield url


def alone() -> dict[str, str]:
    """Return an environment in which nothing but the loopback is reached, by any proxy."""
    nowhere = "http://127.0.0.1:9"
    return {
        **os.environ,
        "http_proxy": nowhere,
        "https_proxy": nowhere,
        "no_proxy": "127.0.0.1,localhost",
        "LC_ALL": "C",
    }

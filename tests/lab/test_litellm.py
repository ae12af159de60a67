"""LiteLLM on a node: built there from the lock that ships, in front of the node's own gateway.

The server behind the gateway is a stand-in. The wheels are those of the lock, laid on the node, for
a lab's node reaches no index. What LiteLLM itself does with requests is tests/unit/network/litellm.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import testinfra

from lab import provisioning_sources, wheelhouse
from lab.nodes import Lab
from lab.run_command import run
from lab.state import CACHE, LabState, exclusive, forget, write
from tests.lab.conftest import Run
from tests.lab.gateway_pair import GPU_NODES, PORT, Pair
from tests.lab.roles.node_state import account, listens, owners, services
from tests.support.checkout import ROOT, own_lab

LAB_ID = own_lab("gfll")
NODE = "mon-03"
VERSION = "1.106.2"
LOCK = ROOT / f"locks/litellm-{VERSION}.txt"
KEY, UPSTREAM_KEY = "a-clients-own-key", "the-key-of-litellm-itself"
UNIT = "gpufleet-litellm.service"
ON_NODE = "/root/litellm-wheels"

pytestmark = pytest.mark.timeout(1800)


class Proxied(Pair):
    """The lab: a node with a stand-in server, and one with a gateway and LiteLLM in front of it."""

    def lay_out(self) -> None:
        super().lay_out()
        upstream = hashlib.sha256(UPSTREAM_KEY.encode()).hexdigest()
        client = hashlib.sha256(KEY.encode()).hexdigest()
        write(self.project / "upstream", f"{UPSTREAM_KEY}\n", 0o600)
        self.gateway = {
            "port": PORT,
            "listen": "127.0.0.1",
            "clients": [{"name": "litellm", "key_sha256": upstream}],
        }
        litellm = {
            "version": VERSION,
            "lock": str(LOCK),
            "uv_lock": str(self.state.dir / "locks/uv.txt"),
            "no_index": True,
            # uv is among the lab's own wheels.
            "find_links": [f"{self.state.mirror_url}/wheels/", ON_NODE],
            "upstream_key_file": str(self.project / "upstream"),
            "clients": [{"name": "tests", "key_sha256": client}],
            "aliases": {"assistant": "tiny"},
        }
        self.declare_gateway(litellm)

    def declare_gateway(self, litellm: dict[str, Any] | None) -> None:
        """Write the variables of the node in front."""
        values = {"gpu_node": False, "gateway": self.gateway, "litellm": litellm}
        self._declare("gateway", values)

    def litellm(self, *arguments: str) -> Run:
        return self.pyinfra(*arguments, "--limit", NODE, deploy="deploys/litellm.py", seconds=1500)

    def ask(self, key: str, model: str) -> tuple[int, str]:
        """Ask LiteLLM on its node; return HTTP's status and the body."""
        body = json.dumps({"model": model, "prompt": "x", "max_tokens": 1})
        said = self.ssh(
            NODE,
            f"curl -sS --max-time 30 -w '\\n%{{http_code}}' -H 'Authorization: Bearer {key}' "
            f"-H 'Content-Type: application/json' -d '{body}' "
            "http://127.0.0.1:4000/v1/completions",
        )
        text, _, status = said.rpartition("\n")
        return int(status), text


def wheels() -> Path:
    """Return a folder of this machine with the wheels of the lock; the first call downloads."""
    digest = hashlib.sha256(LOCK.read_bytes()).hexdigest()[:12]
    folder = CACHE / f"litellm-{digest}"
    with exclusive("litellm", CACHE, limit=900), tempfile.TemporaryDirectory() as venv:
        if not folder.is_dir():
            draft = folder.with_name(f".{folder.name}.new")
            if draft.exists():
                forget(draft)
            # The nodes' Python chooses their wheels. Here it may be a later patch than there: take
            # along what earlier patches need.
            wanted = Path(venv) / "wanted.txt"
            wanted.write_text(
                re.sub(r" ; python_full_version < '3\.11\.\d+'", "", LOCK.read_text())
            )
            run(wheelhouse._node_python(), "-m", "venv", venv, limit=60)
            download = (f"{venv}/bin/python", "-m", "pip", "download", "--quiet", "--no-deps")
            run(
                *(*download, "--require-hashes", "--only-binary=:all:"),
                *(f"--dest={draft}", f"--requirement={wanted}"),
                limit=900,
            )
            draft.rename(folder)
    return folder


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxied]:
    lab = Lab.open(LAB_ID, print)
    keep = bool(os.environ.get("GPUFLEET_KEEP_LAB"))
    if not keep:
        lab.purge()  # what a killed run left
    lab.up({**dict.fromkeys(GPU_NODES, "t4x1"), NODE: "none"})
    wheelhouse.wheelhouse(versions=(provisioning_sources.VLLM,))
    wheelhouse.write_locks(LabState.load(LAB_ID).dir, version=provisioning_sources.VLLM)
    found = Proxied(Lab.open(LAB_ID, print), tmp_path_factory.mktemp("litellm"))
    shutil.copytree(wheels(), lab.root(NODE) / ON_NODE.lstrip("/"), dirs_exist_ok=True)
    found.lay_out()
    found.serve()
    yield found
    if not keep:
        lab.purge()


def test_names_are_served_by_the_gateways_servers(proxied: Proxied) -> None:
    run = proxied.deploy("-y")
    assert run.status == 0, run.output

    run = proxied.litellm("-y")

    assert run.status == 0, run.output
    for name in ("tiny", "assistant"):
        status, body = proxied.ask(KEY, name)
        assert status == 200, body
        assert json.loads(body)["choices"]
    assert proxied.ask("another", "tiny")[0] == 401


def test_it_runs_as_its_own_account_from_one_release(proxied: Proxied) -> None:
    node = testinfra.get_host(f"ssh://{NODE}", ssh_config=str(proxied.state.ssh_config))
    files = {
        "/opt/litellm": "root:root 755",
        "/opt/litellm/releases": "root:root 755",
        "/usr/local/libexec/gpufleet/litellm-serve": "root:root 755",
        f"/etc/systemd/system/{UNIT}": "root:root 644",
        "/etc/gpufleet/litellm/credentials": "root:root 700",
        "/etc/gpufleet/litellm/credentials/upstream-key": "root:root 600",
    }
    assert services(node, UNIT) == {UNIT: "active enabled"}
    assert node.check_output(f"systemctl show -P User {UNIT}") == "litellm"
    assert account(node, "litellm") == "litellm /var/lib/litellm /usr/sbin/nologin"
    assert owners(node, *files) == files
    assert "127.0.0.1:4000" in listens(node)


def test_a_second_deploy_changes_nothing(proxied: Proxied) -> None:
    pid = proxied.ssh(NODE, f"systemctl show -P MainPID {UNIT}")
    for arguments in (["--dry"], ["-y"]):
        run = proxied.litellm(*arguments, "--json")
        assert (run.status, run.changed) == (0, {}), run.output
    assert proxied.ssh(NODE, f"systemctl show -P MainPID {UNIT}") == pid


def test_without_its_setting_it_is_gone_with_its_secrets(proxied: Proxied) -> None:
    proxied.declare_gateway(None)

    run = proxied.litellm("-y")

    assert run.status == 0, run.output
    proxied.ssh(NODE, f"! systemctl is-active {UNIT} && ! test -e /etc/systemd/system/{UNIT}")
    left = proxied.ssh(NODE, f"grep -rl {UPSTREAM_KEY} /etc /run /var/lib/litellm || :")
    assert left == ""

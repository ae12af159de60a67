"""`gpufleet report`: what it writes of a fleet that is silent, of a document, and of manifests."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from gpufleet.redact import HIDDEN
from gpufleet.report.fleet_document import form_text
from gpufleet.report.fleet_manifest import manifest_of
from tests.support import warm_command
from tests.support.fleet_folder import VLLM
from tests.unit.report.sample_fleet import document

INVENTORY = """\
from gpufleet import inventory
from tests.support import warm_command

def at(number):
    return {"ssh_hostname": f"127.0.0.{number}", "ssh_port": 9}

globals().update(inventory.load(__file__, groups={
    "gpu": [(f"gpu-{n:02}", at(n)) for n in range(1, 14)],
    "front": [("front", at(99))],
}))
"""
CANARY = "canary7391"
GPU = {
    "vllm": {**VLLM, "api_key_file": "secrets/key", "hf_token_file": "secrets/token"},
    "serving": {
        "tiny": {
            "model": f"/srv/{CANARY}-aws",  # as an operator's mistake may have it
            "replicas": 2,
            "environment_files": {"AWS_SECRET_ACCESS_KEY": "secrets/aws"},
        }
    },
}
FRONT = {
    "gpu_node": False,
    "gateway": {
        "port": 9,
        "allow_plain_http": True,
        "clients": [{"name": "app", "key_sha256": "a" * 64}],
    },
}


def report(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    run = warm_command.run(["report", *words], cwd=folder, timeout=120)
    assert "Traceback" not in run.stderr
    return run


@pytest.fixture
def silent(tmp_path: Path) -> Path:
    """Return a project whose nodes refuse connections, and whose secrets are canaries."""
    for name in ("inventories", "group_vars", "secrets"):
        (tmp_path / name).mkdir()
    (tmp_path / "inventories/prod.py").write_text(INVENTORY)
    for group, values in (("gpu", GPU), ("front", FRONT)):
        (tmp_path / f"group_vars/{group}.yml").write_text(json.dumps(values))
    for name in ("key", "token", "aws"):
        (tmp_path / "secrets" / name).write_text(f"{CANARY}-{name}\n")
    journals = tmp_path / ".gpufleet/upgrades"
    journals.mkdir(parents=True)
    (journals / "20261101T100000Z-00ff.jsonl").write_text(f'{{"{CANARY}-aws": broken\n')
    return tmp_path


def test_a_silent_fleet_is_a_page_that_says_so_a_manifest_and_status_1(silent: Path) -> None:
    run = report(
        silent, "inventories/prod.py", "--json", "-o", "r.html", "--manifest", "fleet.json"
    )

    assert run.returncode == 1, run.stderr
    found = json.loads(run.stdout)
    assert [each["name"] for each in found["nodes"]] == [
        "front", *(f"gpu-{n:02}" for n in range(1, 14))
    ]  # fmt: skip
    assert all(each["silent"] for each in found["nodes"])
    assert found["plan"]["unknown"]
    assert any("20261101T100000Z-00ff" in each for each in found["unknown"])
    named = {"inventories/prod.py", "group_vars/gpu.yml", "gpufleet's locks/uv.txt"}
    assert named <= set(found["files"])
    manifest = json.loads((silent / "fleet.json").read_text())
    assert manifest["nodes"]["gpu-01"] is None
    page = (silent / "r.html").read_text()
    assert page.count("UNKNOWN</strong>: silent") == 14
    assert not [name for name in found["files"] if "secrets" in name]
    assert [each["source"] for each in found["models"]] == [f"/srv/{HIDDEN}"]
    for text in (run.stdout, run.stderr, page, json.dumps(manifest)):
        assert CANARY not in text


def test_a_document_gives_the_same_bytes_each_time_without_a_fleet(tmp_path: Path) -> None:
    (tmp_path / "d.json").write_text(form_text(document()))
    for name in ("a", "b"):
        run = report(tmp_path, "--from", "d.json", "-o", f"{name}.html", "--manifest", name)
        assert run.returncode == 1, run.stderr
        assert "not known: gpu-04: no answer within 20 s" in run.stderr
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    again = report(tmp_path, "--from", "d.json", "--json")
    assert again.stdout == (tmp_path / "d.json").read_text()


def test_0_is_all_known(tmp_path: Path) -> None:
    (tmp_path / "d.json").write_text(form_text(document(unknown=())))
    assert report(tmp_path, "--from", "d.json", "-o", "r.html").returncode == 0


def test_two_manifests_are_compared_as_text_and_as_json(tmp_path: Path) -> None:
    for name, version in (("a", "0.2.0"), ("b", "0.3.0")):
        text = form_text(manifest_of(document(version=version)))
        (tmp_path / f"{name}.json").write_text(text)
    run = report(tmp_path, "--compare", "a.json", "b.json")
    assert run.returncode == 1
    assert "gpufleet: version: 0.2.0 -> 0.3.0" in run.stdout.splitlines()
    told = json.loads(report(tmp_path, "--compare", "a.json", "b.json", "--json").stdout)
    assert [each["about"] for each in told["differences"]] == ["gpufleet"]
    same = report(tmp_path, "--compare", "a.json", "a.json")
    assert (same.returncode, same.stdout.splitlines()[-1]) == (0, "no difference")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ("inventories/prod.py",),
            "The output is missing: give -o FILE, --manifest FILE or --json.",
        ),
        (("--compare", "a.json", "a.json", "-o", "x"), "--compare needs two manifests,"),
        (("--from", "a.json", "--drift", "-o", "x"), "--from works without INVENTORY and"),
        (("--from", "none.json", "-o", "x"), "none.json: cannot be read: No such file"),
        (("--from", "a.json", "-o", "x"), "a.json: inventory: is missing: give a file that"),
        (("--compare", "a.json", "a.json"), "`gpufleet report --manifest`"),
        (("none.py", "-o", "x"), "none.py: there is no such inventory file"),
    ],
)
def test_what_is_typed_wrong_is_refused_with_what_to_type(
    tmp_path: Path, words: tuple[str, ...], says: str
) -> None:
    (tmp_path / "a.json").write_text('{"schema": 1}')
    run = report(tmp_path, *words)
    assert run.returncode == 2
    assert says in run.stderr
    assert not (tmp_path / "x").exists()

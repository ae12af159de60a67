"""`gpufleet lock INVENTORY --models`: the Hub's own hashes, of a Hub that is asked for real."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from gpufleet.artifacts.model_lock import read_lock
from gpufleet.cli.lock_command import lock
from gpufleet.errors import FleetError
from lab import fake_hub, package_mirror, tiny_model
from tests.unit.bundle.conftest import TOKEN, running

MODEL = "lab/tiny"


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    """A fleet of one node that serves a model of the Hub."""
    state = tmp_path / "state"
    (state / "secrets").mkdir(parents=True)
    (state / package_mirror.TOKEN).write_text(TOKEN + "\n")
    revision = fake_hub.revision_of(tiny_model.write(state / package_mirror.MODELS / MODEL))
    for folder in ("inventories", "group_vars"):
        (tmp_path / folder).mkdir()
    (tmp_path / "inventories/prod.py").write_text(
        "from gpufleet import inventory\n"
        'globals().update(inventory.load(__file__, groups={"h100": ["gpu-01"]}))\n'
    )
    with running(package_mirror.server(state, ("127.0.0.1", 0), tmp_path)) as origin:
        vllm = {
            "version": "0.32.0",
            "lock": "locks/vllm.txt",
            "listen": "127.0.0.1",
            "hf_endpoint": f"{origin}/hub",
            "hf_token_file": str(state / package_mirror.TOKEN),
        }
        serving = {"tiny": {"model": MODEL, "revision": revision}}
        (tmp_path / "group_vars/prod.yml").write_text(
            yaml.safe_dump({"vllm": vllm, "serving": serving})
        )
        yield tmp_path


def run(project: Path, *arguments: str) -> Result:
    words = [str(project / "inventories/prod.py"), "--models", *arguments]
    return CliRunner().invoke(lock, words, standalone_mode=False)


def test_the_lock_has_every_file_with_its_hash_and_is_written_once(project: Path) -> None:
    dry = run(project, "--dry")
    assert dry.return_value == 1
    path = project / "models.lock.json"
    assert not path.exists()

    assert run(project).return_value == 0

    (files,) = read_lock(path).values()
    model = project / "state" / package_mirror.MODELS / MODEL
    there = {each.name: each.read_bytes() for each in model.iterdir() if each.is_file()}
    assert files.keys() == there.keys()
    for name, (algorithm, digest) in files.items():
        head = b"blob %d\0" % len(there[name])
        assert digest == (
            hashlib.sha256(there[name]).hexdigest()
            if algorithm == "sha256"
            else hashlib.sha1(head + there[name]).hexdigest()
        )
    assert "already contains these models" in run(project).output
    assert json.loads(dry.stdout) == json.loads(path.read_text())


def test_a_revision_that_is_locked_keeps_its_hashes(project: Path) -> None:
    """What a Hub says of it later counts for nothing."""
    run(project)
    path = project / "models.lock.json"
    text = path.read_text()
    for each in (project / "state" / package_mirror.MODELS / MODEL).iterdir():
        each.unlink()

    assert run(project).return_value == 0
    assert path.read_text() == text


def test_groups_and_sets_are_no_part_of_it(project: Path) -> None:
    found = run(project, "--set", "r595")
    assert isinstance(found.exception, FleetError)
    assert "remove --group and --set" in str(found.exception)

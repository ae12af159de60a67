"""No command prints a secret that stands in group_vars, not when it refuses it either."""

from __future__ import annotations

import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from gpufleet.cli.main import gpufleet
from tests.support import warm_command
from tests.support.commands import commands

CANARY = "canary7391"
VARIABLES = {
    "vllm": {
        "version": "0.32.0",
        "lock": "locks/none.txt",
        "listen": "127.0.0.1",
        "index_url": f"https://user:{CANARY}@index.example/simple",
        "find_links": [f"https://{CANARY}@wheels.example/"],
        "hf_endpoint": f"https://user:{CANARY}@hub.example",
        "environment": {"OPENAI_API_KEY": CANARY},
    },
    "cuda": {"toolkit": "13-0", "repository": {"url": f"http://u:{CANARY}@packages.example"}},
    "serving": {
        "m": {
            "model": "/srv/m",
            "environment": {"AWS_SECRET_ACCESS_KEY": CANARY, "MOTTO": f"hf_{CANARY * 2}"},
            "flags": {"additional-config": {"password": CANARY}},
        }
    },
    "_env": {"GIT_PASSWORD": CANARY},
}
KEYS = (
    "vllm.index_url",
    "vllm.find_links.0",
    "vllm.hf_endpoint",
    "vllm.environment.OPENAI_API_KEY",
    "cuda.repository.url",
    "serving.m.environment.AWS_SECRET_ACCESS_KEY",
    "serving.m.environment.MOTTO",
    "serving.m.flags.additional-config.password",
    "_env.GIT_PASSWORD",
)
INVENTORY = "inventories/prod.py"
COMMANDS = (
    f"inventory {INVENTORY}",
    f"inventory --json {INVENTORY}",
    f"inventory --changed {INVENTORY}",
    f"plan --as h100x8 {INVENTORY}",
    f"plan --json {INVENTORY}",
    f"check --json {INVENTORY}",
    f"status --json {INVENTORY}",
    f"drift {INVENTORY}",
    f"topology {INVENTORY}",
    f"reach {INVENTORY}",
    f"logs {INVENTORY} m",
    f"lock --set r580-lts --dry {INVENTORY}",
    f"bundle {INVENTORY} -o bundle",
    f"upgrade --dry {INVENTORY}",
    f"drain {INVENTORY} 192.0.2.7 --why test",
    f"monitoring render out {INVENTORY}",
    f"monitoring render --no-ask out {INVENTORY}",
    f"cordon {INVENTORY} 192.0.2.7 --why test",
    f"rollback {INVENTORY}",
    f"probe {INVENTORY}",
    f"report --json {INVENTORY}",
    f"batch {INVENTORY} m requests.jsonl -o answers.jsonl",
    f"deploy vllm {INVENTORY} -y",
    f"doctor {INVENTORY}",
    f"doctor --bundle doctor.tar.gz {INVENTORY}",
    f"lock --models {INVENTORY}",
    f"measure {INVENTORY} m",
    f"measure --tune --key-file key {INVENTORY} m",
    f"monitoring silence {INVENTORY} 192.0.2.7 --why test",
    f"monitoring silences {INVENTORY}",
    f"monitoring unsilence {INVENTORY} 192.0.2.7",
    f"preflight {INVENTORY}",
    f"report -o report.html {INVENTORY}",
    f"uncordon {INVENTORY} 192.0.2.7",
    f"undrain {INVENTORY} 192.0.2.7",
    f"validate {INVENTORY}",
    f"validate --json {INVENTORY}",
)
BY_OTHER_NAMES = {"plan", "topology", "deploy", "doctor"}
"""Commands that take an inventory as one of several things."""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "inventories").mkdir()
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "inventories/prod.py").write_text(
        "from gpufleet import inventory\n"
        "globals().update(inventory.load(__file__, groups={'gpu': ['192.0.2.7']}))\n"
    )
    (tmp_path / "group_vars/gpu.yml").write_text(yaml.safe_dump(VARIABLES))
    (tmp_path / "requests.jsonl").write_text("{}\n")
    return tmp_path


def run(project: Path, command: str) -> subprocess.CompletedProcess[str]:
    return warm_command.run(command.split(), cwd=project)


def test_every_command_that_reads_an_inventory_is_tried() -> None:
    taking = {
        words.removeprefix("gpufleet ")
        for words, command in commands(gpufleet)
        if any(parameter.name == "inventory_file" for parameter in command.params)
    }
    tried = {each.partition(f" {INVENTORY}")[0] for each in COMMANDS}
    left = {
        each for each in taking | BY_OTHER_NAMES if not any(one.startswith(each) for one in tried)
    }
    assert left == set()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_refuses_what_is_in_the_open_and_prints_none_of_it(
    command: str, project: Path
) -> None:
    done = run(project, command)

    printed = done.stdout + done.stderr
    # A deploy ends with the status of pyinfra.
    assert done.returncode == (1 if command.startswith("deploy") else 2), printed
    assert CANARY not in printed
    assert "Traceback" not in printed
    # A document of problems is what `--json` was asked for.
    said = done.stdout if command.startswith("validate --json") else done.stderr
    missing = [key for key in KEYS if f"{key}: " not in said]
    assert missing == [], printed
    assert "group_vars/gpu.yml:" in said


BY_FILES = """
vllm:
  version: 0.32.0
  lock: a.txt
  listen: 127.0.0.1
  api_key_file: secrets/api-key
  hf_token_file: secrets/hf-token
serving:
  m:
    model: /srv/m
    environment_files: {AWS_SECRET_ACCESS_KEY: secrets/aws}
"""
SECRETS = ("api-key", "hf-token", "aws", "key")


@pytest.mark.parametrize(
    "command",
    [
        f"inventory {INVENTORY}",
        f"inventory --json {INVENTORY}",
        f"plan --as h100x8 --json {INVENTORY}",
        f"validate --json {INVENTORY}",
        f"report --manifest fleet.json -o report.html {INVENTORY}",
        f"doctor --bundle doctor.tar.gz --json {INVENTORY}",
        f"preflight --json {INVENTORY}",
        f"monitoring render --no-ask out {INVENTORY}",
        f"measure --tune --key-file key {INVENTORY} m",
    ],
)
def test_a_secret_by_its_file_is_taken_and_its_content_is_nowhere(
    command: str, project: Path
) -> None:
    """No node answers: whatever a command does of itself, it does without the files' contents."""
    (project / "secrets").mkdir()
    for name in SECRETS:
        (project / "secrets" / name).write_text(f"{CANARY}-of-{name}-long-enough\n")
        (project / "secrets" / name).chmod(0o600)
    (project / "key").symlink_to("secrets/key")
    (project / "group_vars/gpu.yml").write_text(BY_FILES)
    (project / "inventories/prod.py").write_text(
        "from gpufleet import inventory\n"
        "node = {'ssh_hostname': '127.0.0.1', 'ssh_port': 1}\n"
        "globals().update(inventory.load(__file__, groups={'gpu': [('192.0.2.7', node)]}))\n"
    )
    done = run(project, command)

    assert CANARY not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert [path for path, content in written(project) if CANARY.encode() in content] == []
    if "--bundle" in command:
        assert (project / "doctor.tar.gz").is_file(), done.stderr
    if command.startswith("inventory"):
        assert done.returncode == 0, done.stderr
        assert "secrets/aws" in done.stdout


def written(project: Path) -> Iterator[tuple[str, bytes]]:
    """Yield each file below a project but its secrets; of an archive each file in it."""
    for path in project.rglob("*"):
        if not path.is_file() or path.is_symlink() or "secrets" in path.parts:
            continue
        yield path.name, path.read_bytes()
        if path.suffix == ".gz":
            with tarfile.open(path) as archive:
                for member in filter(tarfile.TarInfo.isfile, archive):
                    content = archive.extractfile(member)
                    assert content
                    yield member.name, content.read()

"""Secret files that others can read, and unchecked host keys, get a remark and stop nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpufleet.inventory import loader

VARIABLES = """
vllm:
  version: 0.32.0
  lock: locks/none.txt
  api_key_file: secrets/key
  environment_files: {A_KEY: secrets/a}
gateway:
  allow_unauthenticated: true
  tls: {certificate_file: secrets/cert.pem, key_file: secrets/tls.pem}
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for folder in ("inventories", "group_vars", "secrets"):
        (tmp_path / folder).mkdir()
    (tmp_path / "inventories/fake.py").write_text(
        "from gpufleet import inventory\n"
        "globals().update(inventory.load(__file__, groups={'gpu': ['a', 'b']}))\n"
    )
    (tmp_path / "group_vars/gpu.yml").write_text(VARIABLES)
    for name in ("key", "a", "cert.pem", "tls.pem"):
        (tmp_path / "secrets" / name).write_text("x")
        (tmp_path / "secrets" / name).chmod(0o600)
    return tmp_path


def remarks(project: Path) -> list[str]:
    return list(loader.read(project / "inventories/fake.py").remarks)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("key", "vllm.api_key_file"),
        ("a", "vllm.environment_files.A_KEY"),
        ("tls.pem", "gateway.tls.key_file"),
    ],
)
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_secret_that_others_can_read_is_remarked_upon_once(
    project: Path, name: str, key: str, mode: int
) -> None:
    assert remarks(project) == []
    (project / "secrets" / name).chmod(mode)

    (remark,) = remarks(project)

    assert remark.startswith("group_vars/gpu.yml:")
    assert f"{key}: secrets/{name} has mode {mode:04o}" in remark
    assert remark.endswith(f"chmod 600 secrets/{name}")


def test_what_is_no_secret_may_be_read(project: Path) -> None:
    (project / "secrets/cert.pem").chmod(0o644)
    assert remarks(project) == []


@pytest.mark.parametrize("value", ["no", "accept-new"])
def test_host_keys_that_are_not_checked_are_remarked_upon(project: Path, value: str) -> None:
    with (project / "group_vars/gpu.yml").open("a") as file:
        file.write(f'ssh_strict_host_key_checking: "{value}"\n')

    (remark,) = remarks(project)

    assert f"ssh_strict_host_key_checking: {value}: " in remark
    assert "ssh_known_hosts_file" in remark


OPEN = """
vllm:
  version: 0.32.0
  lock: locks/none.txt
  allow_unauthenticated: true
gateway:
  clients: [{name: ada, key_sha256: %s}]
  tls: {certificate_file: secrets/cert.pem, key_file: secrets/tls.pem}
""" % ("ab" * 32)
NO_KEYS = f"  clients: [{{name: ada, key_sha256: {'ab' * 32}}}]", "  allow_unauthenticated: true"


def test_servers_without_a_key_behind_a_gateway_with_keys_are_remarked_upon_once(
    project: Path,
) -> None:
    (project / "group_vars/gpu.yml").write_text(OPEN)

    (remark,) = remarks(project)

    assert remark.startswith("group_vars/gpu.yml:5: vllm.allow_unauthenticated: ")
    assert "needs no key" in remark
    assert "`api_key_file`" in remark


@pytest.mark.parametrize(
    ("before", "after"),
    [
        # The gateway asks for none either; the servers do; or a gateway alone reaches them.
        NO_KEYS,
        ("  allow_unauthenticated: true\ngateway", "  api_key_file: secrets/key\ngateway"),
        ("  allow_unauthenticated: true\n", "  listen: 127.0.0.1\n"),
        ("\ngateway:", "\nfirewall: {clients: [192.0.2.7]}\ngateway:"),
    ],
)
def test_servers_that_nobody_reaches_past_the_gateways_keys_are_not(
    project: Path, before: str, after: str
) -> None:
    assert before in OPEN
    (project / "group_vars/gpu.yml").write_text(OPEN.replace(before, after))

    assert remarks(project) == []


def test_a_firewall_that_names_no_clients_leaves_them_open(project: Path) -> None:
    (project / "group_vars/gpu.yml").write_text(OPEN + "firewall: {}\n")

    assert len(remarks(project)) == 1

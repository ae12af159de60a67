"""Host keys as an SSH server shows them, and as ssh-keygen prints their fingerprints."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import paramiko
import pytest

from gpufleet.errors import FleetError
from gpufleet.setup.host_keys import (
    fetch_keys,
    fingerprint,
    known_hosts_keys,
    known_hosts_line,
    known_hosts_text,
)
from gpufleet.setup.hosts import Host


def test_the_key_that_a_server_shows_is_in_known_hosts_as_ssh_keygen_reads_it(
    server: Host, key: paramiko.PKey, tmp_path: Path
) -> None:
    found = fetch_keys([server])["gpu-01"]
    file = tmp_path / "known_hosts"
    file.write_text(known_hosts_line(server, found))

    listed = subprocess.run(
        ["ssh-keygen", "-lf", file], capture_output=True, text=True, check=True, timeout=10
    ).stdout
    assert found == key
    assert f" {fingerprint(found)} [127.0.0.1]:{server.port} " in listed


def test_a_file_of_host_keys_has_lines_for_the_hosts_that_are_in_it(
    key: paramiko.PKey, tmp_path: Path
) -> None:
    known, unknown = Host("gpu-01", "192.0.2.1", "root"), Host("gpu-02", "192.0.2.2", "root")
    file = tmp_path / "known_hosts"
    file.write_text(f"gpu-01,192.0.2.1 {key.get_name()} {key.get_base64()}\n")

    found = known_hosts_keys(file, [known, unknown])

    assert known_hosts_text(found) == known_hosts_line(known, key)


def test_every_host_that_shows_no_key_is_named_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        closed = taken.getsockname()[1]
    hosts = [
        Host("gpu-01", "127.0.0.1", "root", closed),
        Host("gpu-02", "gpu-02", "root", jump=True),
        Host("gpu-03", "node-3.example", "root", jump=True),
    ]

    with pytest.raises(FleetError) as refused:
        fetch_keys(hosts)

    first, second, third = refused.value.problems
    assert first.startswith(f"gpu-01 ([127.0.0.1]:{closed}): gpufleet could not get the host key: ")
    assert second.startswith("gpu-02: is reached through a different host")
    assert third.startswith("gpu-03 (node-3.example): is reached through a different host")
    assert "--known-hosts" in second

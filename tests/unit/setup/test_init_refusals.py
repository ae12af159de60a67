"""`gpufleet init` as operators type it, up to where it would log in."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import paramiko

from gpufleet.setup.host_keys import fingerprint
from gpufleet.setup.hosts import Host

GPUFLEET = Path(sys.executable).with_name("gpufleet")


def init(
    cwd: Path, *words: object, terminal: int = subprocess.DEVNULL
) -> subprocess.CompletedProcess[str]:
    """Run it with a home of its own, so that no ~/.ssh counts."""
    return subprocess.run(
        [GPUFLEET, "init", *map(str, words)],
        cwd=cwd,
        env=os.environ | {"HOME": str(cwd)},
        stdin=terminal,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_without_a_terminal_new_keys_are_shown_and_refused(
    server: Host, key: paramiko.PKey, tmp_path: Path
) -> None:
    done = init(tmp_path, "fleet", f"root@127.0.0.1:{server.port}")

    assert done.returncode == 2
    assert fingerprint(key) in done.stdout
    assert "--yes" in done.stderr
    assert "--known-hosts" in done.stderr
    assert not (tmp_path / "fleet").exists()


def test_a_no_at_the_terminal_writes_nothing(
    server: Host, key: paramiko.PKey, tmp_path: Path
) -> None:
    ours, theirs = pty.openpty()
    os.write(ours, b"n\n")

    done = init(tmp_path, "fleet", f"root@127.0.0.1:{server.port}", terminal=theirs)
    os.close(ours)
    os.close(theirs)

    assert done.returncode == 130
    assert fingerprint(key) in done.stdout
    assert "Are these the keys of your hosts?" in done.stdout
    assert not (tmp_path / "fleet").exists()


def test_every_host_that_a_file_of_keys_lacks_is_named(tmp_path: Path) -> None:
    (tmp_path / "known").touch()

    done = init(tmp_path, "fleet", "gpu-01", "gpu-02:2222", "--known-hosts", "known")

    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "error: known: contains no key of gpu-01",
        "error: known: contains no key of [gpu-02]:2222",
    ]


def test_mistakes_end_in_sentences_and_status_2(tmp_path: Path) -> None:
    (tmp_path / "hosts.txt").write_text("models: [a]\n")
    for words, sentence in (
        (("fleet",), "Give either HOST...,"),
        (("fleet", "a@b@c", "gpu-01:x"), "error: gpu-01:x: is not the name of a host"),
        (("fleet", "--ansible", "none.ini"), "error: none.ini: cannot be read"),
        (("fleet", "--ansible", "hosts.txt"), "error: hosts.txt: is not an Ansible inventory"),
        (("fleet", "gpu-01", "--model", "qwen"), "error: --model qwen: write ORG/NAME"),
        (("fleet", "gpu-01", "--settings", "none.yml"), "there is no such file"),
    ):
        done = init(tmp_path, *words)
        assert done.returncode == 2, words
        assert sentence in done.stderr, words
        assert "Traceback" not in done.stderr
        assert not (tmp_path / "fleet").exists()

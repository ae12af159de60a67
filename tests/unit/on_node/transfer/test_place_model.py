"""A download becomes root's and gets its place; root follows no link that is planted in it."""

from __future__ import annotations

import hashlib
import json
import os
import pwd
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from gpufleet.remote import payload

USER = pwd.getpwuid(os.getuid()).pw_name
REVISION = "17b23a3e"


def run(
    action: str,
    directory: Path,
    files: Mapping[str, tuple[str, str]] | None = None,
    **more: str,
) -> str:
    """Return what it says when it refuses; "": it did it."""
    program = payload.program(
        "transfer/place_model",
        action=action,
        directory=str(directory),
        mark=str(directory / ".complete"),
        user=USER,
        files=files,
        **more,
    )
    done = subprocess.run(
        [sys.executable, "-I", "-"],
        input=program,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode == 0:
        assert json.loads(done.stdout) == {"schema": 1}
        return ""
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tmp_path / "models/org--name" / REVISION


@pytest.fixture
def downloading(model: Path) -> Path:
    """Return where a download that has begun writes files."""
    model.parent.parent.mkdir()
    assert run("begin", model) == ""
    return model.parent / f".gpufleet-download-{REVISION}/files"


def test_a_download_is_placed_whole_and_readable(model: Path, downloading: Path) -> None:
    assert downloading.parent.stat().st_mode & 0o777 == 0o700
    (downloading / "sub").mkdir(0o700)
    (downloading / "sub/a.safetensors").write_bytes(b"a")
    (downloading / "config.json").write_text("{}")
    (downloading / "config.json").chmod(0o600)
    (downloading / ".cache").mkdir()
    model.mkdir()  # what an older release downloaded straight to there, not whole
    (model / "half").touch()

    assert run("place", model) == ""

    assert sorted(each.name for each in model.iterdir()) == [".complete", "config.json", "sub"]
    assert (model / "config.json").stat().st_mode & 0o777 == 0o644
    assert (model / "sub").stat().st_mode & 0o777 == 0o755
    assert [each.name for each in model.parent.iterdir()] == [REVISION]
    assert run("place", model) == ""
    assert run("begin", model) == ""
    assert [each.name for each in model.parent.iterdir()] == [REVISION]


def test_a_download_goes_on_but_for_a_reboot(model: Path, downloading: Path) -> None:
    (downloading / "half").touch()
    assert run("begin", model) == ""
    assert (downloading / "half").exists()

    (model.parent / f"{REVISION}.boot").write_text("another")
    assert run("begin", model) == ""
    assert not (downloading / "half").exists()


def test_no_link_leads_root_out_of_the_folder(model: Path, downloading: Path) -> None:
    """As a program with the rights of the service user could plant them."""
    victim = model.parents[2] / "victim"
    victim.mkdir()
    secret = victim / "secret"
    secret.write_text("secret")
    secret.chmod(0o600)
    boot = model.parent / f"{REVISION}.boot"

    boot.unlink()
    boot.symlink_to(secret)
    assert run("begin", model) == ""
    assert not boot.is_symlink()

    for name, plant in {
        "link": lambda each: each.symlink_to(secret),
        "folder": lambda each: each.symlink_to(victim, target_is_directory=True),
        "hard link": lambda each: os.link(secret, each),
        "pipe": os.mkfifo,
        ".complete": lambda each: each.symlink_to(secret),
    }.items():
        plant(downloading / name)
        assert str(model / name) in run("place", model), name
        assert not model.exists()
        (downloading / name).unlink()

    downloading.rmdir()
    downloading.symlink_to(victim, target_is_directory=True)
    assert run("place", model)
    downloading.parent.rename(model.parent / "aside")
    downloading.parent.symlink_to(victim, target_is_directory=True)
    assert run("place", model)
    assert run("begin", model) == "", "a new folder takes the place of the link"

    assert secret.read_text() == "secret"
    assert secret.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in victim.iterdir()] == ["secret"]


def test_a_file_that_somebody_still_writes_is_not_taken(model: Path, downloading: Path) -> None:
    with (downloading / "a.safetensors").open("wb"):
        assert "still writing" in run("place", model)
    assert run("place", model) == ""


@pytest.mark.skipif(os.getuid() != 0, reason="gives files to another user")
def test_models_of_the_service_user_become_roots_and_stay_readable(model: Path) -> None:
    """What is there is not downloaded again, and whoever reads it goes on."""
    nobody = pwd.getpwnam("nobody")
    secret = model.parents[2] / "secret"
    secret.write_text("secret")
    model.mkdir(parents=True)
    (model / "a.safetensors").write_bytes(b"a" * 100)
    (model / "a.safetensors").chmod(0o600)
    (model / "link").symlink_to(secret)
    models = model.parents[1]
    for each in (models, *models.rglob("*")):
        os.chown(each, nobody.pw_uid, nobody.pw_gid, follow_symlinks=False)
    os.chown(secret, nobody.pw_uid, nobody.pw_gid)
    before = (model / "a.safetensors").stat()

    assert run("own", models) == ""

    for each in (models, *models.rglob("*")):
        assert (each.lstat().st_uid, each.lstat().st_gid) == (0, 0), each
    after = (model / "a.safetensors").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert after.st_mode & 0o777 == 0o644
    assert secret.stat().st_uid == nobody.pw_uid


def git(content: bytes) -> tuple[str, str]:
    return "git", hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def sha256(content: bytes) -> tuple[str, str]:
    return "sha256", hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"config.json": git(b"{}"), "sub/a": sha256(b"a")}, ""),
        ({"config.json": git(b"{ }"), "sub/a": sha256(b"a")}, "config.json has the git hash"),
        ({"config.json": git(b"{}"), "sub/a": sha256(b"b")}, "sub/a has the sha256 hash"),
        ({"config.json": git(b"{}")}, "sub/a is not in the model lock"),
        (
            {"config.json": git(b"{}"), "sub/a": sha256(b"a"), "tokenizer.json": git(b"")},
            "tokenizer.json is missing",
        ),
    ],
    ids=["as locked", "git", "sha256", "one too many", "one missing"],
)
def test_a_download_is_held_to_the_lock_of_models(
    model: Path, downloading: Path, files: Mapping[str, tuple[str, str]], said: str
) -> None:
    """What the client notes of a download counts for nothing; what is wrong is not kept."""
    (downloading / "sub").mkdir()
    (downloading / "sub/a").write_bytes(b"a")
    (downloading / "config.json").write_bytes(b"{}")
    (downloading / ".cache/huggingface").mkdir(parents=True)
    (downloading / ".cache/huggingface/note").touch()

    assert said in run("place", model, files)
    assert model.exists() is (said == "")
    assert not downloading.exists()


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """Return a folder of the node with an adapter and what its training left there."""
    source = tmp_path / "srv/sql"
    source.mkdir(parents=True)
    (source / "adapter_config.json").write_text("{}")
    (source / "adapter_model.safetensors").write_bytes(WEIGHTS)
    (source / "adapter_model.safetensors").chmod(0o600)
    (source / "optimizer.pt").write_bytes(b"large")
    (source / "checkpoint-100").mkdir()
    return source


WEIGHTS = b"weights"
SHA256 = hashlib.sha256(WEIGHTS).hexdigest()


def copied(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir(exist_ok=True)
    return tmp_path / "models/adapters" / SHA256


def test_of_an_adapter_two_files_are_copied_whole_and_readable(
    tmp_path: Path, adapter: Path
) -> None:
    place = copied(tmp_path)

    assert run("copy", place, source=str(adapter), sha256=SHA256) == ""

    names = [".complete", "adapter_config.json", "adapter_model.safetensors"]
    assert sorted(each.name for each in place.iterdir()) == names
    assert (place / "adapter_model.safetensors").read_bytes() == WEIGHTS
    assert {each.stat().st_mode & 0o777 for each in place.iterdir()} == {0o644}
    assert [each.name for each in place.parent.iterdir()] == [SHA256]
    # What is there is left alone, whatever became of its source.
    (adapter / "adapter_model.safetensors").write_bytes(b"other")
    assert run("copy", place, source=str(adapter), sha256=SHA256) == ""
    assert (place / "adapter_model.safetensors").read_bytes() == WEIGHTS


def test_weights_with_another_hash_are_refused_and_leave_nothing(
    tmp_path: Path, adapter: Path
) -> None:
    (adapter / "adapter_model.safetensors").write_bytes(b"other")
    place = copied(tmp_path)

    said = run("copy", place, source=str(adapter), sha256=SHA256)

    assert hashlib.sha256(b"other").hexdigest() in said
    assert f"`sha256` of the adapter is {SHA256}" in said
    assert list(place.parent.iterdir()) == []


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("kind", ["link", "pipe", "directory", "nothing"])
def test_an_adapter_is_files_and_no_link_is_followed(
    tmp_path: Path, adapter: Path, name: str, kind: str
) -> None:
    place, file = copied(tmp_path), adapter / name
    file.unlink()
    match kind:
        case "link":
            file.symlink_to("/etc/hostname")
        case "pipe":
            os.mkfifo(file)
        case "directory":
            file.mkdir()

    said = run("copy", place, source=str(adapter), sha256=SHA256)

    assert str(file) in said
    assert not place.exists()


def test_a_copy_that_was_interrupted_starts_over(tmp_path: Path, adapter: Path) -> None:
    place = copied(tmp_path)
    left = place.parent / f".gpufleet-download-{SHA256}/files"
    left.mkdir(parents=True)
    (left / "adapter_model.safetensors").write_bytes(b"half")

    assert run("copy", place, source=str(adapter), sha256=SHA256) == ""

    assert (place / "adapter_model.safetensors").read_bytes() == WEIGHTS

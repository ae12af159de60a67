"""What is noted of builds, beside a lock."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpufleet.artifacts import built_releases
from gpufleet.artifacts.release import Release, release
from gpufleet.errors import FleetError
from gpufleet.settings.serving_settings import Vllm

KIND = ("ubuntu 24.04", "x86_64", "CPython 3.12.3")
OTHER = ("ubuntu 22.04", "x86_64", "CPython 3.10.12")
LOCK = b"vllm==0.32.0 --hash=sha256:00\n"


def wanted(folder: Path, lock: bytes = LOCK) -> Release:
    settings = Vllm.model_validate(
        {"version": "0.32.0", "lock": str(folder / "vllm.txt"), "allow_unauthenticated": True}
    )
    return release(settings, lock, b"uv==0.13.9 --hash=sha256:00\n")


def test_what_was_noted_is_read_again_by_kind_and_of_this_lock_alone(tmp_path: Path) -> None:
    assert built_releases.read_note(wanted(tmp_path)) == {}
    for kind, tree in ((KIND, "a" * 64), (OTHER, "b" * 64), (KIND, "c" * 64), (KIND, "c" * 64)):
        built_releases.note_build(wanted(tmp_path), kind, tree, "gpu-01")

    assert built_releases.read_note(wanted(tmp_path)) == {
        KIND: {"a" * 64, "c" * 64},
        OTHER: {"b" * 64},
    }
    assert built_releases.read_note(wanted(tmp_path, LOCK + b"# other\n")) == {}
    assert [each.name for each in tmp_path.iterdir()] == ["vllm.txt.built.json"]


@pytest.mark.parametrize("text", ["", "[]", '{"built": [{"tree": "x"}]}', '{"built": 1}'])
def test_a_note_that_is_none_is_refused_by_its_path(tmp_path: Path, text: str) -> None:
    """To take it for empty would have the release built anew, and the note overwritten."""
    path = built_releases.note_path(wanted(tmp_path))
    path.write_text(text)

    for ask in (
        lambda: built_releases.read_note(wanted(tmp_path)),
        lambda: built_releases.note_build(wanted(tmp_path), KIND, "a" * 64, "gpu-01"),
    ):
        with pytest.raises(FleetError, match=r"vllm\.txt\.built\.json"):
            ask()
    assert path.read_text() == text

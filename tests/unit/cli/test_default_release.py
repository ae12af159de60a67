"""A command speaks of the release that the project serves, unless another one is named."""

from __future__ import annotations

from pathlib import Path

from gpufleet.cli.default_release import SHIPPED, default_release
from gpufleet.flags import schema
from tests.support.checkout import ROOT


def test_it_is_the_newest_lock_of_the_project(tmp_path: Path) -> None:
    (tmp_path / "locks").mkdir()
    for name in ("vllm-0.9.2.txt", "vllm-0.31.0.txt", "vllm-mine.txt", "litellm-1.106.2.txt"):
        (tmp_path / "locks" / name).touch()
    assert default_release(tmp_path) == "0.31.0"


def test_elsewhere_it_is_the_one_that_gpufleet_comes_with(tmp_path: Path) -> None:
    assert default_release(tmp_path) == SHIPPED
    assert default_release(ROOT) == SHIPPED
    assert SHIPPED in schema.versions()

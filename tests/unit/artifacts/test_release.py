"""A release's id is its content; what cannot be trusted is refused before a node is touched."""

from __future__ import annotations

import subprocess

import pytest

from gpufleet.artifacts.release import build_script, cuda_release, pinned, release, wheels
from gpufleet.errors import FleetError
from gpufleet.settings.serving_settings import Vllm
from tests.support.checkout import ROOT
from tests.support.rows import each_row

LOCK = b"vllm==0.32.0 \\\n    --hash=sha256:" + b"0" * 64 + b"\n"
UV = b"uv==0.13.9 \\\n    --hash=sha256:" + b"1" * 64 + b"\n"


def vllm(**more: object) -> Vllm:
    given: dict[str, object] = {"version": "0.32.0", "lock": "a.txt", "listen": "127.0.0.1", **more}
    return Vllm.model_validate(given)


def test_the_same_lock_is_the_same_release_and_another_lock_another() -> None:
    first = release(vllm(), LOCK, UV)
    assert first.id.startswith("0.32.0-")
    assert release(vllm(), LOCK, UV).id == first.id
    assert release(vllm(), LOCK.replace(b"000", b"111"), UV).id != first.id
    assert release(vllm(python="/usr/bin/python3.12"), LOCK, UV).id != first.id


def test_where_packages_come_from_is_not_part_of_a_release() -> None:
    """Hashes say what a package is: another mirror brings the same one."""
    assert release(vllm(index_url="http://a/"), LOCK, UV).id == release(vllm(), LOCK, UV).id


def test_a_lock_without_hashes_and_one_for_another_version_are_refused_together() -> None:
    with pytest.raises(FleetError) as refused:
        release(vllm(version="0.31.0"), LOCK, b"uv==0.13.9\n")
    assert len(refused.value.problems) == 2
    assert "vllm.version is 0.31.0, but the lock has vllm==0.32.0" in str(refused.value)


@each_row(
    ("line", "package", "version"),
    [
        ("ray==2.60.0 \\", "ray", "2.60.0"),
        ("ray[default,serve]==2.60.0 \\", "ray", "2.60.0"),
        ("Deep_EP==1.2.1", "deep-ep", "1.2.1"),
        ("torch==2.14.0+cu130 ; platform_machine == 'x86_64' \\", "torch", "2.14.0+cu130"),
        ("a @ https://x/whl/a-1.0%2Bcu13-cp312-cp312-linux_x86_64.whl", "a", "1.0+cu13"),
        ("a-b @ https://x/a_b-1.0.tar.gz#sha256=00", "a_b", "1.0"),
        ("a @ git+https://x/a.git@0123abc", "a", ""),
        ("raylib==1.0", "ray", None),
        ("    --hash=sha256:00", "hash", None),
        ("# via ray==2.60.0", "ray", None),
        ("array==1.0\nray==2.0", "ray", "2.0"),
    ],
)
def test_a_lock_says_the_version_of_a_package_however_it_is_written(
    line: str, package: str, version: str | None
) -> None:
    assert pinned(line.encode(), package) == version


def test_the_cuda_of_a_lock_is_its_runtimes_under_either_name() -> None:
    assert cuda_release(b"nvidia-cuda-runtime==13.0.96 \\\n") == (13, 0)
    assert cuda_release(b"nvidia-cuda-runtime-cu12==12.8.90 \\\n") == (12, 8)
    assert cuda_release(b"nvidia-cuda-nvrtc==13.5.37 \\\n") is None
    ours = (ROOT / "locks/vllm-0.32.0.txt").read_bytes()
    assert wheels(ours, "a").cuda == (13, 0)


@pytest.mark.parametrize("name", ["vllm-0.32.0.txt", "uv.txt"])
def test_the_locks_that_we_ship_are_whole(name: str) -> None:
    """Every requirement of them has a hash; no host and no path is in them."""
    text = (ROOT / "locks" / name).read_text()
    entries = text.replace("\\\n", " ").splitlines()
    named = [entry for entry in entries if entry.strip() and not entry.startswith("#")]
    assert named
    assert [entry for entry in named if "--hash=sha256:" not in entry] == []
    assert "://" not in text


def test_the_build_script_is_a_shell_script_and_marks_last() -> None:
    script = build_script(
        release(vllm(find_links=("http://m:1/wheels/",), no_index=True), LOCK, UV)
    )
    assert subprocess.run(["sh", "-n"], input=script, text=True, check=False).returncode == 0
    assert script.rstrip().endswith("fi")
    assert script.index("rm -rf /opt/vllm/releases") < script.index("uv pip sync")
    assert script.index("uv pip sync") < script.index("sync -f /opt/vllm/releases")
    assert script.index("sync -f /opt/vllm/releases") < script.rindex("touch ")
    assert "--require-hashes" in script
    assert "--trusted-host=m:1" in script


def test_no_python_of_a_release_runs_as_root_in_its_build() -> None:
    """A wheel's `.pth` runs at each start: all that starts it is sandbox.sandbox_prefix's."""
    script = build_script(release(vllm(), LOCK, UV))

    starts = [line.strip() for line in script.splitlines() if "$python" in line]
    assert len(starts) == 3, starts
    # uv asks the environment for its version, which is empty before its first wheel.
    (fills,) = [each for each in starts if "DynamicUser=yes" not in each]
    assert fills.startswith("--python $python")
    assert "$uv pip sync" in script.splitlines()[script.splitlines().index(f"        {fills}") - 1]
    assert "--compile-bytecode" not in script


def test_a_second_build_waits_for_half_an_hour() -> None:
    script = build_script(release(vllm(), LOCK, UV))

    assert f"flock -w {30 * 60} 9" in script

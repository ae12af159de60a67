"""The lab's build of SGLang for CPUs."""

from __future__ import annotations

import csv
import importlib.metadata
import os
import subprocess
import sys
import zipfile
from ipaddress import IPv4Network
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpufleet.artifacts.release import Program, release
from gpufleet.errors import FleetError
from lab import provisioning_sources, sglang_wheels, wheelhouse
from lab.state import LabState

VERSION = "0.5.23"
NET = IPv4Network("10.201.7.0/24")


def published(folder: Path, *, without: str = "") -> Path:
    """A wheel with SGLang's requirements, as the index has it."""
    folder.mkdir()
    requires = [f"{name}==1.0" for name in sorted(sglang_wheels.GPU_PACKAGES - {without})]
    requires += ["flashinfer_python[cu13]==0.7.2"] if without != "flashinfer-python" else []
    requires += ["torch==2.14.1", "torchaudio==2.11.0", "fastapi", "transformers==5.19.0"]
    files = {
        "sglang/__init__.py": "x = 1\n",
        "sglang/E=1,N=2.json": "{}",
        "entry_points.txt": "[console_scripts]\n",
    }
    return wheelhouse.write_wheel(folder, "sglang", VERSION, requires=requires, files=files)


def test_a_cpu_build_requires_the_labs_torch_and_nothing_for_gpus(tmp_path):
    wheel = sglang_wheels.repack(published(tmp_path / "index"), tmp_path)
    (distribution,) = importlib.metadata.distributions(path=[str(wheel)])

    assert distribution.version == f"{VERSION}+cpu"
    assert distribution.requires == [
        f"torch=={sglang_wheels.TORCH}",
        "torchaudio",
        "fastapi",
        "transformers==5.19.0",
    ]


def test_a_cpu_build_has_the_files_of_the_published_wheel_and_their_hashes(tmp_path):
    wheel = sglang_wheels.repack(published(tmp_path / "index"), tmp_path)

    with zipfile.ZipFile(wheel) as archive:
        assert archive.read("sglang/__init__.py") == b"x = 1\n"
        record = archive.read(f"sglang-{VERSION}+cpu.dist-info/RECORD").decode().splitlines()
        listed = {row[0] for row in csv.reader(record)}
        assert listed == set(archive.namelist())


def test_a_cpu_build_has_the_same_bytes_every_time(tmp_path):
    """Its hash is in locks that are older than the next download."""
    source = published(tmp_path / "index")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()

    first, second = (sglang_wheels.repack(source, tmp_path / name) for name in ("a", "b"))

    assert first.read_bytes() == second.read_bytes()


def test_a_release_with_other_packages_for_gpus_is_refused_by_their_names(tmp_path):
    source = published(tmp_path / "index", without="tilelang")

    with pytest.raises(FleetError, match=r"does not require tilelang: .*GPU_PACKAGES"):
        sglang_wheels.repack(source, tmp_path)


def test_packages_for_gpus_can_be_imported_and_do_nothing(tmp_path):
    """They are base classes, decorators and modules below modules; a real package comes first."""
    wheel = sglang_wheels.write_cpu_package(tmp_path)
    (tmp_path / "timm.py").write_text("real = True\n")
    program = """
import gpufleet_lab_sglang, timm
import flashinfer.comm as comm
from sgl_kernel.mamba import causal_conv1d
from triton.runtime import KernelInterface
import triton
class Kernel(KernelInterface): pass
@triton.jit(debug=True)
def kernel(): pass
assert list(comm.Everything.that()) == [] and causal_conv1d(1) is not None and timm.real
assert kernel() is None and not hasattr(triton.runtime, 'driver')
"""
    subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": os.pathsep.join((str(tmp_path), str(wheel)))},
        check=True,
    )


def test_the_stand_ins_are_imported_at_each_start(tmp_path):
    """A `.pth` file beside the packages is what Python runs."""
    with zipfile.ZipFile(sglang_wheels.write_cpu_package(tmp_path)) as archive:
        assert archive.read("gpufleet_lab_sglang.pth") == b"import gpufleet_lab_sglang\n"


def test_the_settings_for_nodes_name_a_lock_of_the_cpu_build(tmp_path, monkeypatch):
    """Settings name the published version; its local version is the lab's."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name, version in (("sglang", f"{VERSION}+cpu"), (sglang_wheels.CPU_PACKAGE, "1")):
        wheelhouse.write_wheel(wheels, name.replace("-", "_"), version)
    monkeypatch.setattr(sglang_wheels, "sglang_wheels", lambda **_: wheels)
    monkeypatch.setattr(LabState, "dir", tmp_path)
    lock = sglang_wheels.write_lock
    monkeypatch.setattr(sglang_wheels, "write_lock", lambda state: lock(state, tmp_path))
    uv = b"uv==0.13.9 --hash=sha256:1"
    program = Program("sglang", "/opt/sglang", "/opt/sglang/cache", ("torch", "sglang"))

    settings = provisioning_sources.sglang_settings(LabState("lab", NET))

    source = SimpleNamespace(**settings, python="/usr/bin/python3")
    built = release(source, Path(settings["lock"]).read_bytes(), uv, program)
    assert built.id.startswith(f"{VERSION}-")
    assert settings["no_index"]
    assert settings["find_links"] == ["http://10.201.7.1:8080/wheels/"]

"""Bytecode is compiled beside its source, and no code of a package runs meanwhile."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpufleet.remote import payload


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """An environment of this Python with a package in it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "v"], check=True)
    (found,) = (tmp_path / "v").glob("lib/python3*/site-packages")
    (found / "package").mkdir()
    for name in ("__init__", "module"):
        (found / f"package/{name}.py").write_text("x = 1\n")
    return found


def compiled(packages: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [packages.parents[2] / "bin/python", "-ISB", "-", packages.parents[1]],
        input=payload.source("transfer/compile_bytecode"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def cache(source: Path) -> Path:
    return Path(importlib.util.cache_from_source(str(source)))


def test_every_source_has_its_bytecode_and_what_is_no_python_is_left(packages: Path) -> None:
    (packages / "package/template.py").write_text("{{ name }} = 1")

    done = compiled(packages)

    assert done.returncode == 0, done.stderr
    assert done.stdout == "Bytecode compiled of 2 of 3 files\n"
    assert cache(packages / "package/__init__.py").is_file()
    assert cache(packages / "package/module.py").is_file()
    assert not cache(packages / "package/template.py").exists()


def test_python_takes_it_for_the_sources(packages: Path) -> None:
    compiled(packages)
    python = packages.parents[2] / "bin/python"
    done = subprocess.run(
        [python, "-Iv", "-c", "import package.module"], capture_output=True, text=True, check=True
    )
    assert f"{cache(packages / 'package/module.py')} matches" in done.stderr


def test_bytecode_does_not_depend_on_when_its_source_was_unpacked(packages: Path) -> None:
    """Nodes that build for themselves have the same files."""
    source = packages / "package/module.py"
    found = []
    for seconds in (1_600_000_000, 1_700_000_000):
        os.utime(source, (seconds, seconds))
        compiled(packages)
        found.append(cache(source).read_bytes())
    assert found[0] == found[1]


def test_a_source_that_a_person_changes_is_run_as_it_is_then(packages: Path) -> None:
    compiled(packages)
    (packages / "package/module.py").write_text("x = 2\n")
    done = subprocess.run(
        [packages.parents[2] / "bin/python", "-IBc", "import package.module as m; print(m.x)"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "2\n"


def test_what_packages_have_run_at_each_start_does_not_run(packages: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (packages / "at_start.pth").write_text(f"import os; open({str(ran)!r}, 'w')\n")
    (packages / "sitecustomize.py").write_text(f"open({str(ran)!r}, 'w')\n")
    # Names of the standard library, which a program might take from there.
    for name in ("py_compile", "concurrent", "os"):
        (packages / f"{name}.py").write_text(f"open({str(ran)!r}, 'w')\n")

    done = compiled(packages)

    assert done.returncode == 0, done.stderr
    assert not ran.exists()
    subprocess.run([packages.parents[2] / "bin/python", "-I", "-c", ""], check=True)
    assert ran.exists(), "a start of the environment itself runs it"


def test_what_cannot_be_written_ends_it(packages: Path) -> None:
    """As a full disk does: what has no bytecode would compile at each start of a server."""
    place = cache(packages / "package/module.py")
    place.parent.mkdir()
    place.mkdir()

    done = compiled(packages)

    assert done.returncode != 0
    assert os.fspath(place) in done.stderr

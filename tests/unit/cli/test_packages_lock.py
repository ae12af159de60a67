"""`gpufleet packages lock`: uv resolves against an index for real; the lock has wheels alone."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from uv import find_uv_bin

from gpufleet.artifacts.package_lock import pins_of, sbom_differences
from gpufleet.cli.packages_command import packages
from gpufleet.errors import FleetError
from tests.support.checkout import ROOT
from tests.unit.bundle.index_of_packages import Index, served

LINUX = "cp312-cp312-manylinux_2_17_x86_64"


@pytest.fixture
def index(tmp_path: Path) -> Index:
    """A vllm that needs two packages, each with a source distribution beside its wheels."""
    found = Index(tmp_path / "www")
    found.wheel("vllm", "0.32.0", "alpha", "beta; sys_platform == 'linux'", tags=LINUX)
    found.wheel("alpha", "1.0")
    found.wheel("beta", "2.0", tags=LINUX)
    for name, version in (("vllm", "0.32.0"), ("alpha", "1.0"), ("beta", "2.0")):
        found.sdist(name, version)
    return found


@pytest.fixture
def url(index: Index, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name in [each for each in os.environ if each.startswith("UV_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("UV_NO_CACHE", "1")  # uv believes an index's page for ten minutes
    with served(index.root) as address:
        yield f"{address}/simple"


def run(folder: Path, url: str, *words: str) -> Result:
    folder.mkdir(exist_ok=True)
    arguments = ["lock", *(words or ("vllm", "0.32.0")), "--index", url, "--folder", str(folder)]
    return CliRunner().invoke(packages, arguments, standalone_mode=False)


def made(result: Result, folder: Path) -> tuple[str, str]:
    assert result.return_value == 0, result.exception
    return (
        (folder / "vllm-0.32.0.txt").read_text(),
        (folder / "vllm-0.32.0.cdx.json").read_text(),
    )


def hashes(text: str) -> set[str]:
    return set(re.findall(r"sha256:([0-9a-f]{64})", text))


def test_a_lock_has_the_wheels_and_no_source_distribution(
    index: Index, url: str, tmp_path: Path
) -> None:
    text, _ = made(run(tmp_path / "locks", url), tmp_path / "locks")

    assert [*pins_of(text)] == [("alpha", "1.0"), ("beta", "2.0"), ("vllm", "0.32.0")]
    wheels = {digest for file, digest in index.hashes.items() if file.endswith(".whl")}
    assert hashes(text) == wheels
    assert url.partition("//")[2] not in text


def test_uv_installs_from_it_with_hashes_as_nodes_do(
    index: Index, url: str, tmp_path: Path
) -> None:
    index.wheel("litellm", "1.0", "alpha")
    folder = tmp_path / "locks"
    assert run(folder, url, "litellm", "1.0").return_value == 0
    words = [find_uv_bin(), "pip", "install", "--no-config", "--no-build", "--require-hashes"]
    words += ["--default-index", url, "--python", sys.executable]
    words += ["--target", str(tmp_path / "there"), "-r", str(folder / "litellm-1.0.txt")]
    subprocess.run(words, check=True, capture_output=True)
    assert {"litellm.py", "alpha.py"} <= {each.name for each in (tmp_path / "there").iterdir()}


def test_the_sbom_names_every_package_and_every_file(
    index: Index, url: str, tmp_path: Path
) -> None:
    text, sbom = made(run(tmp_path / "locks", url), tmp_path / "locks")
    document = json.loads(sbom)

    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.5")
    # The form that the standard's schema holds it to.
    assert re.fullmatch(
        r"urn:uuid:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", document["serialNumber"]
    )
    assert document["metadata"]["component"]["name"] == "vllm"
    assert {each["purl"] for each in document["components"]} == {
        "pkg:pypi/alpha@1.0",
        "pkg:pypi/beta@2.0",
        "pkg:pypi/vllm@0.32.0",
    }
    files = {
        each["url"]: each["hashes"]
        for component in document["components"]
        for each in component["externalReferences"]
    }
    assert files == {
        name: [{"alg": "SHA-256", "content": digest}]
        for name, digest in index.hashes.items()
        if name.endswith(".whl")
    }
    assert sbom_differences(text, sbom) == ()


def test_a_second_run_writes_nothing_and_what_is_locked_stays(
    index: Index, url: str, tmp_path: Path
) -> None:
    folder = tmp_path / "locks"
    text, _ = made(run(folder, url), folder)
    index.wheel("alpha", "1.1")

    again = run(folder, url)
    assert again.return_value == 0
    assert "already has these packages" in again.output
    assert (folder / "vllm-0.32.0.txt").read_text() == text
    dry = run(folder, url, "vllm", "0.32.0", "--upgrade", "--dry")
    assert dry.return_value == 1
    assert (folder / "vllm-0.32.0.txt").read_text() == text
    assert "alpha==1.1" in dry.stdout
    newer, _ = made(run(folder, url, "vllm", "0.32.0", "--upgrade"), folder)
    assert newer == dry.stdout
    assert not list(folder.glob(".*"))


def test_a_lock_of_before_loses_its_source_distributions_and_nothing_else(
    index: Index, url: str, tmp_path: Path
) -> None:
    folder = tmp_path / "locks"
    text, _ = made(run(folder, url), folder)
    index.wheel("alpha", "1.1")
    old = re.sub(
        r"^alpha==1.0 ", f"alpha==1.0 \\\\\n    --hash=sha256:{'0' * 64} ", text, flags=re.MULTILINE
    )
    (folder / "vllm-0.32.0.txt").write_text(old)

    assert made(run(folder, url), folder)[0] == text


def test_what_is_asked_for_beside_it_comes_too(index: Index, url: str, tmp_path: Path) -> None:
    index.wheel("ray", "3.0")
    index.wheel("ray", "2.60.0")
    folder = tmp_path / "locks"
    text, _ = made(run(folder, url, "vllm", "0.32.0", "--also", "ray==2.60.0"), folder)
    assert ("ray", "2.60.0") in pins_of(text)


def test_a_package_without_a_wheel_is_refused_by_name_and_nothing_is_written(
    index: Index, url: str, tmp_path: Path
) -> None:
    index.wheel("vllm", "0.33.0", "gamma", tags=LINUX)
    index.sdist("gamma", "1.0")
    folder = tmp_path / "locks"
    result = run(folder, url, "vllm", "0.33.0")
    assert isinstance(result.exception, FleetError)
    assert "gamma" in str(result.exception)
    assert list(folder.iterdir()) == []


def test_a_lock_of_sglang_has_the_name_that_its_section_gives(
    index: Index, url: str, tmp_path: Path
) -> None:
    index.wheel("sglang", "0.5.23", "alpha", tags=LINUX)
    folder = tmp_path / "locks"
    assert run(folder, url, "sglang", "0.5.23").return_value == 0
    text = (folder / "sglang-0.5.23.txt").read_text()
    assert [*pins_of(text)] == [("alpha", "1.0"), ("sglang", "0.5.23")]


def test_an_unknown_program_and_an_index_that_is_not_there_are_refused(tmp_path: Path) -> None:
    result = run(tmp_path / "locks", "http://127.0.0.1:9/simple", "vlm", "1")
    assert "did you mean 'vllm'?" in str(result.exception)
    result = run(tmp_path / "locks", "http://ada:hunter2@127.0.0.1:9/simple")
    assert isinstance(result.exception, FleetError)
    assert "hunter2" not in str(result.exception)


def test_every_shipped_lock_has_its_sbom_and_wheels_alone() -> None:
    """The SBOM names the file of each hash, and names wheels only."""
    locks = sorted((ROOT / "locks").glob("*.txt"))
    assert [each.name for each in locks] == ["litellm-1.106.2.txt", "uv.txt", "vllm-0.32.0.txt"]
    for path in locks:
        sbom = path.with_name(f"{path.stem}.cdx.json").read_text()
        assert sbom_differences(path.read_text(), sbom) == (), path.name
        files = [
            each["url"]
            for component in json.loads(sbom)["components"]
            for each in component["externalReferences"]
        ]
        assert [each for each in files if not each.endswith(".whl")] == [], path.name
        hashes = set(re.findall(r"[0-9a-f]{64}", path.read_text()))
        assert hashes == set(re.findall(r'"content": "([0-9a-f]{64})"', sbom)), path.name

"""Building: once per content, whole or not at all, and words for the operator when it cannot."""

import re
import shutil

import pytest

from gpufleet.errors import FleetError
from lab import nvml
from tests.support.rows import each_row


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A copy of the C sources that a test may break."""
    copy = tmp_path / "sources"
    shutil.copytree(nvml.SOURCES, copy)
    monkeypatch.setattr(nvml, "SOURCES", copy)
    return copy


def test_unchanged_sources_are_not_compiled_again(sources, tmp_path, monkeypatch):
    """With the same inputs, not even a compiler is needed; with others, one is."""
    library = nvml.build(tmp_path / "out")
    built = library.stat()

    monkeypatch.setenv("PATH", "")
    assert nvml.build(tmp_path / "out").stat() == built

    with (sources / "events.c").open("a") as source:
        source.write("/* changed */\n")
    with pytest.raises(FleetError, match="apt install gcc"):
        nvml.build(tmp_path / "out")


def test_a_broken_source_leaves_the_old_library_in_place(sources, tmp_path):
    """The operator reads what gcc said; whoever uses the library keeps a working one."""
    library = nvml.build(tmp_path / "out")
    before = library.read_bytes()

    (sources / "events.c").write_text("this is not C\n")
    with pytest.raises(FleetError, match=r"gcc refuses .*\n.*events\.c"):
        nvml.build(tmp_path / "out")

    assert library.read_bytes() == before
    assert {file.name for file in library.parent.iterdir()} == {
        library.name,
        f"{library.name}.inputs",
    }


def test_an_unknown_profile_lists_those_there_are():
    """The operator reads the choice, and where to write a new one."""
    with pytest.raises(FleetError, match="choose one of a100x2-pcie, a100x4-pcie, a100x8"):
        nvml.profile("h300x8")


DOCUMENT = nvml.SOURCES.parents[1] / "docs" / "develop" / "lab-profiles.md"


def documented(key):
    """Whether the tables of docs/develop/lab-profiles.md have a line for `key`."""
    patterns = re.findall(r"^\| `([^`]+)`", DOCUMENT.read_text(), re.MULTILINE)
    return any(re.fullmatch(re.sub(r"[A-Z]+", r"[^.]+", re.escape(p)), key) for p in patterns)


def keys_of(profile):
    lines = profile.read_text().splitlines()
    keys = [line.split("=")[0].strip() for line in lines if line and not line.startswith("#")]
    return {re.sub(r"^gpu\.(\*|\d+)\.", "", key) for key in keys}


@each_row("name", nvml.profiles())
def test_every_key_of_a_profile_is_documented(name):
    """A key that no document knows is a typing mistake: the library would never read it."""
    assert {key for key in keys_of(nvml.profile(name)) if not documented(key)} == set()


def test_every_key_that_the_library_reads_is_documented():
    """The tables are complete: no key is known to the C sources alone."""
    text = "\n".join(path.read_text() for path in sorted(nvml.SOURCES.glob("*.c")))
    reads = r"(?:_text|_has|_number|_key|_field|bytes)"
    asked = re.findall(reads + r'\([^"()]*(?:\([^"()]*\))?[^"()]*"([\w.]+)"', text)
    asked += re.findall(r'GETTER\(\w+, "([\w.]+)"', text)

    assert len(set(asked)) > 60
    assert {key for key in asked if not documented(key)} == set()

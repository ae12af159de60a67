"""Where a publisher's program lies on a node, and what may be taken away there."""

from __future__ import annotations

from gpufleet.artifacts.program_archive import ProgramArchive, install_script
from gpufleet.settings.monitoring_settings import PublishedProgram

SHA256 = "89abcdef0123" + "4" * 52
PROGRAM = ProgramArchive(
    "prometheus",
    PublishedProgram(url="https://publisher.example/p.tar.gz", sha256=SHA256),
    ("prometheus", "promtool"),
)


def test_a_version_lies_under_the_first_twelve_digits_of_its_hash() -> None:
    """Another length is another directory: every node would download what it has."""
    assert PROGRAM.directory == "/opt/gpufleet/prometheus/89abcdef0123"
    assert PROGRAM.program("promtool") == f"{PROGRAM.directory}/promtool"


def test_other_versions_are_all_directories_but_its_own_and_hidden_ones() -> None:
    names = frozenset({"ffff00000000", "89abcdef0123", "000000000000", ".lock", ".ffff.new"})

    assert PROGRAM.other_versions(names) == ("000000000000", "ffff00000000")


def test_a_second_download_waits_for_ten_minutes() -> None:
    assert f"flock -w {10 * 60} 9" in install_script(PROGRAM)

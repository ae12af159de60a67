"""What may be wanted of a node, and that no value tells what a file contains."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufleet.converge.desired import (
    Absent,
    DesiredState,
    Directory,
    File,
    Group,
    Line,
    Link,
    NoOtherFiles,
    NoOtherUnits,
    Package,
    Unit,
    UnitGone,
    User,
    started_line,
    unit_of,
)
from gpufleet.errors import FleetError
from gpufleet.on_node.converge import snapshot
from tests.support.rows import each_row

PATH = "/etc/vllm/one"
UNIT = "vllm-tiny-0.service"
UNIT_PATH = f"/etc/systemd/system/{UNIT}"


@given(st.binary(min_size=8), st.booleans())
def test_no_repr_tells_a_files_content(content: bytes, secret: bool) -> None:
    """Debug logs print values: they see path, length and hash, of a secret not even the hash."""
    file = File(PATH, content, mode=0o600, secret=secret)

    for text in (repr(file), str(file), repr(DesiredState(file)), f"{file}"):
        assert repr(content)[2:-1] not in text
        assert (file.sha256 in text) is not secret


def test_the_same_value_twice_is_one() -> None:
    """Two parts of a role may both need a directory."""
    assert len(DesiredState(Directory(PATH)) + DesiredState(Directory(PATH), Group("vllm"))) == 2


@each_row(
    ("one", "other"),
    [
        (File(PATH, b"1"), File(PATH, b"2")),
        (File(PATH, b"1"), File(PATH, b"1", mode=0o600)),
        (File(PATH, b"1"), Directory(PATH)),
        (File(PATH, b"1"), Absent(PATH)),
        (File(PATH, b"1"), Link(PATH, "x")),
        (File(PATH, b"1"), Line(PATH, "1")),
        (Unit(UNIT), UnitGone(UNIT)),
        (Unit(UNIT, "1a"), Unit(UNIT, "2b")),
        (File(UNIT_PATH, b""), UnitGone(UNIT)),
        (File(f"{UNIT_PATH}.d/a.conf", b""), UnitGone(UNIT)),
        (Package("gcc", "1"), Package("gcc", "2")),
        (User("vllm", "vllm", "/a"), User("vllm", "vllm", "/b")),
    ],
)
def test_what_contradicts_itself_is_refused(one: object, other: object) -> None:
    """Otherwise two operations would undo each other's work in every run."""
    for values in ((one, other), (other, one)):
        with pytest.raises(FleetError, match="keep only one of the two"):
            DesiredState(*values)  # type: ignore[arg-type]


def test_every_contradiction_is_named_at_once() -> None:
    with pytest.raises(FleetError) as refused:
        DesiredState(Absent("/a"), Directory("/a"), Unit(UNIT), UnitGone(UNIT))
    assert len(refused.value.problems) == 2


def test_things_of_one_name_and_different_kinds_do_not_contradict() -> None:
    """The user, the group and the package vllm are three things; so are two lines of a file."""
    DesiredState(
        Group("vllm"),
        User("vllm", "vllm", "/var/lib/vllm"),
        Package("vllm"),
        Line(PATH, "a"),
        Line(PATH, "b"),
        NoOtherFiles("/etc/vllm/*"),
        File("/etc/vllm/two", b""),
    )


def test_a_unit_whose_start_records_nothing_is_refused() -> None:
    """Every run would restart it."""
    with pytest.raises(FleetError, match="started_line"):
        DesiredState(File(UNIT_PATH, b"[Service]\n"), Unit(UNIT, "1a2b"))
    line = f"[Service]\n{started_line('1a2b')}\n".encode()
    DesiredState(File(UNIT_PATH, line), Unit(UNIT, "1a2b"))
    DesiredState(File(f"{UNIT_PATH}.d/gpufleet.conf", line), Unit(UNIT, "1a2b"))
    DesiredState(Unit(UNIT, "1a2b"))


def test_the_recording_line_is_exactly_this() -> None:
    """Templates and the snapshot rely on it; `%%` is systemd's way to write one per cent sign."""
    assert started_line("3c4d") == (
        "ExecStartPre=+/bin/sh -c 'mkdir -p /run/gpufleet/started && "
        "printf %%s 3c4d > /run/gpufleet/started/%n'"
    )
    with pytest.raises(FleetError):
        started_line("3c4d'; reboot; '")
    assert snapshot.STARTED_MARKER in started_line("3c4d"), "by which the node knows our units"


@pytest.mark.parametrize(
    "make",
    [
        Package,
        lambda text: Package("gcc", text),
        Group,
        lambda text: User("vllm", text, "/x"),
        Unit,
        lambda text: Unit(UNIT, text),
        UnitGone,
        NoOtherUnits,
        lambda text: File("/x", b"", user=text),
    ],
)
@given(text=st.text())
def test_no_name_can_be_an_option_or_reach_beyond_itself(make: object, text: str) -> None:
    """Names end up in command lines and in paths; whatever is accepted is inert there."""
    try:
        make(text)  # type: ignore[operator]
    except FleetError:
        return
    assert not text.startswith("-")
    assert not set(text) & set("/ \n\t\x00'\"$`;&|<>(){}!#")


@given(st.text())
def test_a_path_is_absolute_and_plain(text: str) -> None:
    for make in (Directory, Absent):
        try:
            make(text)
        except FleetError:
            continue
        assert text.startswith("/")
        assert not {".", "..", ""} & set(text.split("/")[1:])
        assert "\n" not in text


def test_a_secret_for_everybody_is_refused() -> None:
    """The mode is the only thing that keeps it."""
    with pytest.raises(FleetError, match="0644"):
        File(PATH, b"x", secret=True)


def test_a_pattern_of_units_cannot_take_the_systems() -> None:
    for pattern in ("*.service", "*", "v*", "?llm-*.service", "vllm-*"):
        with pytest.raises(FleetError):
            NoOtherUnits(pattern)
    NoOtherUnits("vllm-*.service")


# Shows units as systemd does: those named in the order asked, then those loaded that match.
SYSTEMCTL = """\
#!/bin/sh
while [ "$1" != -- ]; do shift; done
shift
for unit; do
  case "$unit" in
    *"*"*) for each in {loaded}; do
      printf 'Id=%s\\nNames=%s\\nLoadState=loaded\\nActiveState=active\\n\\n' "$each" "$each"
    done ;;
    *)
      state=inactive
      case " {loaded} " in *" $unit "*) state=active ;; esac
      printf 'Id=%s\\nNames=%s\\nLoadState=loaded\\nActiveState=%s\\n\\n' "$unit" "$unit" $state ;;
  esac
done
"""


def test_units_that_match_a_pattern_are_ours_only_if_we_wrote_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node's own program, over directories and a systemctl of this test's making."""
    units, started, programs = (tmp_path / name for name in ("system", "started", "bin"))
    for directory in (units, started, programs):
        directory.mkdir()
    monkeypatch.setattr(snapshot, "UNIT_DIRECTORY", str(units))
    monkeypatch.setattr(snapshot, "STARTED_DIRECTORY", str(started))
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    running = ("vllm-router", "vllm-gone", "vllm-package")
    loaded = " ".join(f"{name}.service" for name in running)
    (programs / "systemctl").write_text(SYSTEMCTL.format(loaded=loaded))
    (programs / "systemctl").chmod(0o755)
    ours = f"[Service]\n{started_line('3c4d')}\nExecStart=/bin/true\n"
    theirs = "[Service]\nExecStart=/opt/router\n"
    (units / "vllm-stray.service").write_text(ours)
    (units / "other.service").write_text(ours)
    (units / "vllm-alias.service").symlink_to("vllm-stray.service")
    (units / "vllm-masked.service").symlink_to("/dev/null")
    (units / "vllm-router.service").write_text(theirs)
    (units / "vllm-router.service.d").mkdir()
    (units / "vllm-router.service.d" / "limits.conf").write_text("[Service]\nLimitNOFILE=4321\n")
    (units / "vllm-extended.service").write_text(theirs)
    (units / "vllm-extended.service.d").mkdir()
    (units / "vllm-extended.service.d" / "gpufleet.conf").write_text(ours)
    (units / "vllm-replaced.service").write_text(theirs)
    for name in ("vllm-gone", "vllm-replaced"):
        (started / f"{name}.service").write_text("3c4d")

    states, alike = snapshot.units(["other.service"], ["vllm-*.service"])
    stray = ["vllm-extended.service", "vllm-gone.service", "vllm-stray.service"]
    assert alike == {"vllm-*.service": stray}
    assert sorted(states) == ["other.service", *stray]
    assert {name for name, each in states.items() if each["active"] == "active"} == {stray[1]}


def test_a_unit_that_was_not_asked_for_is_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where systemctl answers in another order, nothing is believed of any unit."""
    monkeypatch.setattr(snapshot, "UNIT_DIRECTORY", str(tmp_path / "none"))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    turned = "#!/bin/sh\nprintf 'Id=b.service\\nNames=b.service\\n\\nId=a.service\\n'\n"
    (tmp_path / "systemctl").write_text(turned)
    (tmp_path / "systemctl").chmod(0o755)
    states, alike = snapshot.units(["a.service", "b.service"], ["vllm-*.service"])
    wrong = {"error": "systemctl showed b.service instead of a.service"}
    assert states == {"a.service": wrong, "b.service": wrong}
    assert alike == {"vllm-*.service": wrong}


@each_row(
    ("path", "unit"),
    [
        (UNIT_PATH, UNIT),
        (f"{UNIT_PATH}.d/10-limits.conf", UNIT),
        ("/etc/systemd/system/vllm@.service", None),
        ("/etc/systemd/system/vllm@a.service.d/x.conf", "vllm@a.service"),
        ("/etc/systemd/system/service.d/x.conf", None),
        ("/etc/systemd/system/multi-user.target.wants/vllm.service", None),
        ("/etc/systemd/system.conf", None),
        ("/usr/lib/systemd/system/ssh.service", None),
    ],
)
def test_a_path_is_known_for_the_unit_it_defines(path: str, unit: str | None) -> None:
    """What changes there has to be read again by systemd."""
    assert unit_of(path) == unit

"""What a change does on a node: marks, switch, way back, releases; killed at any instruction.

Systemd is a script of a few lines below the tree's own root: it loads unit files when it is told,
and starts what it has loaded, as the real one. That it does what the real one does is proven on a
lab's node; what is proven here is the order of what we write, and what a second call makes of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path

import pytest

from gpufleet.converge.desired import File, started_line
from gpufleet.on_node.change import change, releases
from gpufleet.on_node.change.releases import KeptUnits, Release
from gpufleet.on_node.change.units import read_next
from gpufleet.on_node.common import linux_facts
from gpufleet.serving.unit import UnitFile
from gpufleet.upgrade.run.node_answers import (
    CollectAnswer,
    LockAnswer,
    Marks,
    NodeLook,
    SwitchAnswer,
)
from gpufleet.upgrade.run.staged_units import next_files

UNITS = "etc/systemd/system"
HOME = "var/lib/gpufleet/change"
# Of a unit only its fingerprint is kept: what is loaded, and what runs. It starts no program: it is
# started thousands of times, while a switch is killed at each of its steps.
SYSTEMCTL = r"""#!/bin/sh
root=${0%/usr/bin/systemctl}
units=$root/etc/systemd/system loaded=$root/run/loaded active=$root/run/active
enabled=$root/run/enabled started=$root/run/gpufleet/started
printf '%s\n' "$*" >> "$root/run/log"
value() { value=; [ -e "$1" ] && IFS= read -r value < "$1"; }
print() {
  value=
  [ -e "$1" ] && while IFS= read -r line; do case $line in
    *'printf %%s '*) value=${line#*printf %%s }; value=${value%% *} ;;
  esac; done < "$1"
}
[ "$1" = --quiet ] && shift
verb=$1; shift
[ "$1" = -- ] && shift
case $verb in
  daemon-reload)
    for f in "$loaded"/*; do [ -e "$f" ] && : > "$f"; done
    for f in "$units"/*.service; do
      [ -e "$f" ] && print "$f" && printf '%s\n' "$value" > "$loaded/${f##*/}"; done ;;
  show) for u; do
    case $u in --*) continue ;; esac
    value "$active/$u"; state=${value:+active}
    value "$enabled/$u"; file=${value:+enabled}
    print "$units/$u"; there=$value
    value "$loaded/$u"; load=${value:+loaded}
    stale=no; [ -n "$value" ] && [ "$value" != "$there" ] && stale=yes
    printf 'Id=%s\nLoadState=%s\nActiveState=%s\nSubState=x\nResult=success\n' \
      "$u" "${load:-not-found}" "${state:-inactive}"
    printf 'UnitFileState=%s\nNeedDaemonReload=%s\nNRestarts=0\n\n' "${file:-disabled}" "$stale"
  done ;;
  stop) for u; do : > "$active/$u"; done ;;
  start) for u; do
    value "$loaded/$u"; [ -n "$value" ] || exit 5
    printf %s "$value" > "$started/$u"; printf '%s\n' "$value" > "$active/$u"; done ;;
  enable) for u; do printf 'yes\n' > "$enabled/$u"; done ;;
  disable) for u; do : > "$enabled/$u"; done ;;
  reset-failed) : ;;
  *) exit 9 ;;
esac
exit 0
"""


def unit(name: str, words: str, release: str = "0.32.0-aaaaaaaaaa") -> UnitFile:
    fingerprint = hashlib.sha256(words.encode()).hexdigest()
    text = (
        f"[Service]\n{started_line(fingerprint)}\n"
        f"ExecStart=/opt/vllm/releases/{release}/bin/vllm serve {words}\n"
    )
    return UnitFile(name, f"/{UNITS}/{name}", text, fingerprint)


OLD = unit("vllm-a-0.service", "old")
NEW = unit("vllm-a-0.service", "new", "0.33.0-bbbbbbbbbb")
GOES = unit("vllm-b-0.service", "goes")
COMES = unit("vllm-c-0.service", "comes", "0.33.0-bbbbbbbbbb")
KEY = "/etc/vllm/credentials/api-key"
_GAUGES = ["vllm:num_requests_running", "vllm:num_requests_waiting"]


class Tree:
    """A node as directories."""

    def __init__(self, root: Path) -> None:
        self.root = root
        states = ("loaded", "active", "enabled", "gpufleet/started")
        for folder in (
            *(UNITS, "usr/bin", "etc/vllm/credentials", "proc/sys/kernel/random"),
            *(f"run/{each}" for each in states),
        ):
            (root / folder).mkdir(parents=True)
        program = root / "usr/bin/systemctl"
        program.write_text(SYSTEMCTL)
        program.chmod(0o755)
        (root / "proc/sys/kernel/random/boot_id").write_text("9e6f4b52-4c0e\n")

    def ask(self, do: str, **asked) -> dict:
        return change.answer({"do": do, "sysroot": str(self.root), "metrics": _GAUGES, **asked})

    def prepare(self, units, remove=(), beside=()) -> None:
        """Put in place what deploys/prepare.py would."""
        for value in next_files(units, remove, beside):
            if isinstance(value, File):
                path = self.root / value.path.lstrip("/")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(value.content)

    def run(self, *units: UnitFile) -> None:
        """Have units lie there and run."""
        for each in units:
            (self.root / each.path.lstrip("/")).write_text(each.content)
            for state in ("loaded", "active", "gpufleet/started"):
                (self.root / "run" / state / each.unit).write_text(f"{each.fingerprint}\n")
            (self.root / "run/enabled" / each.unit).write_text("yes\n")

    def file(self, path: str) -> str | None:
        found = self.root / path.lstrip("/")
        return found.read_text() if found.exists() else None

    def started(self, name: str) -> str | None:
        """Return what a unit runs with; None: it does not run."""
        if not (self.file(f"run/active/{name}") or ""):
            return None
        return (self.root / "run/gpufleet/started" / name).read_text().strip()

    @property
    def commands(self) -> list[str]:
        """What systemctl was told, but for questions."""
        log = (self.file("run/log") or "").splitlines()
        return [each for each in log if not each.startswith("show")]


@pytest.fixture(autouse=True)
def _root(monkeypatch):
    """The program runs in this process, and sets it."""
    monkeypatch.setattr(linux_facts, "ROOT", "")


@pytest.fixture
def tree(tmp_path):
    found = Tree(tmp_path)
    found.run(OLD, GOES)
    (found.root / KEY.lstrip("/")).write_text("old key")
    found.prepare([NEW, COMES], [GOES.unit], [File(KEY, b"new key", mode=0o600, secret=True)])
    return found


def is_old(tree: Tree) -> bool:
    return (
        tree.started(OLD.unit) == OLD.fingerprint
        and tree.file(OLD.path) == OLD.content
        and tree.started(GOES.unit) == GOES.fingerprint
        and tree.file(GOES.path) == GOES.content
        and tree.started(COMES.unit) is None
        and tree.file(COMES.path) is None
        and tree.file(KEY) == "old key"
    )


def is_new(tree: Tree) -> bool:
    return (
        tree.started(NEW.unit) == NEW.fingerprint
        and tree.file(NEW.path) == NEW.content
        and tree.started(COMES.unit) == COMES.fingerprint
        and tree.started(GOES.unit) is None
        and tree.file(GOES.path) is None
        and tree.file(KEY) == "new key"
    )


# -- switch and the way back -----------------------------------------------------------------------


def test_a_switch_and_the_way_back_are_exact(tree):
    switched = SwitchAnswer.read("n", tree.ask("switch", id="u1", seconds=10))

    assert switched.problem is None
    assert is_new(tree)
    assert (switched.changed, switched.removed) == ((NEW.unit, COMES.unit), (GOES.unit,))

    restored = SwitchAnswer.read("n", tree.ask("restore", id="u1", seconds=10))

    assert restored.problem is None
    assert is_old(tree)


def test_nothing_lies_between_stop_and_start(tree):
    """Files are written and read by systemd before: the outage is a stop and a start."""
    before = len(tree.commands)
    tree.ask("switch", id="u1", seconds=10, units=[NEW.unit])

    verbs = [each.split()[0] for each in tree.commands[before:]]
    assert verbs[-2:] == ["stop", "start"]
    assert verbs[0] == "daemon-reload"


def test_what_runs_as_wanted_is_left_alone(tree):
    tree.ask("switch", id="u1", seconds=10)
    before = tree.commands

    again = SwitchAnswer.read("n", tree.ask("switch", id="u1", seconds=10))

    assert tree.commands == before
    assert again.changed == again.removed == ()
    assert set(again.unchanged) == {NEW.unit, GOES.unit, COMES.unit}


def test_the_way_back_of_one_that_was_never_switched_touches_nothing(tree):
    before = tree.commands

    restored = SwitchAnswer.read("n", tree.ask("restore", id="u1", seconds=10, units=[OLD.unit]))

    assert restored.unchanged == (OLD.unit,)
    assert tree.commands == before


def test_one_unit_of_several_is_switched_alone(tree):
    tree.ask("switch", id="u1", seconds=10, units=[NEW.unit])

    assert tree.started(NEW.unit) == NEW.fingerprint
    assert tree.started(GOES.unit) == GOES.fingerprint
    assert tree.started(COMES.unit) is None


@pytest.mark.parametrize("broken", [NEW.unit, "manifest.json"])
def test_what_is_not_whole_is_not_switched_to(tree, broken):
    """As after a deploy that was killed while it wrote `next/`: nothing is touched."""
    path = tree.root / HOME / "next" / broken
    path.write_text(path.read_text()[:-30])

    switched = SwitchAnswer.read("n", tree.ask("switch", id="u1", seconds=10))

    assert switched.problem
    assert is_old(tree)


def test_without_anything_prepared_it_says_so(tmp_path):
    switched = SwitchAnswer.read("n", Tree(tmp_path).ask("switch", id="u1", seconds=10))

    assert "deploys/prepare.py" in switched.problem


def test_a_unit_that_does_not_start_is_told_and_can_be_brought_back(tree):
    """The script refuses to start what it has not loaded: here, as if the file had vanished."""
    real = tree.root / "usr/bin/systemctl"
    text = real.read_text()
    real.write_text(text.replace("start) for u;", "start) exit 1; for u;"))

    switched = SwitchAnswer.read("n", tree.ask("switch", id="u1", seconds=10))
    assert "systemctl start" in switched.problem

    real.write_text(text)
    assert tree.ask("restore", id="u1", seconds=10)["problem"] is None
    assert is_old(tree)


# -- killed ----------------------------------------------------------------------------------------

# What changes a disk, and what starts a program: between two of these nothing can be seen.
EVENTS = {
    "open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "os.chown",
    "subprocess.Popen", "os.utime", "os.link", "os.symlink", "os.truncate",
}  # fmt: skip


def killed(tree: Tree, at: int, do: str, **asked) -> bool:
    """Do it in a process that dies before its event number `at`; say whether it died."""
    if (pid := os.fork()) == 0:
        left = [at]

        def count(event: str, arguments: tuple) -> None:
            if event == "open" and not (
                isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
            ):
                return
            if event in EVENTS:
                left[0] -= 1
                if left[0] < 0:
                    os._exit(9)

        sys.addaudithook(count)
        tree.ask(do, **asked)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) == 9


@pytest.fixture
def memory(tmp_path):
    """A directory without a disk below it, where there is one: each step waits for its fsync."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as found:
        yield Path(found)


@pytest.mark.parametrize("then", [pytest.param("switch", marks=pytest.mark.long), "restore"])
def test_killed_at_any_step_of_a_switch_the_next_call_goes_on(memory, then):
    """Forward and back from every state that a kill can leave; and nothing kept is overwritten."""
    for at in range(200):
        tree = Tree(memory / str(at))
        tree.run(OLD, GOES)
        (tree.root / KEY.lstrip("/")).write_text("old key")
        tree.prepare([NEW, COMES], [GOES.unit], [File(KEY, b"new key", mode=0o600, secret=True)])
        died = killed(tree, at, "switch", id="u1", seconds=10)

        assert tree.ask(then, id="u1", seconds=10)["problem"] is None
        assert (is_new if then == "switch" else is_old)(tree), f"killed before event {at}"
        if then == "switch":
            # What was kept is what was before the first call, however far that came.
            kept = (
                NodeLook.read("n", {"schema": 1, "kept": change.kept_upgrades()}).kept["u1"].units
            )
            assert kept[OLD.unit] == OLD.fingerprint
            assert kept[COMES.unit] is None
        if not died:
            break
    assert at > 20


@pytest.mark.long
def test_killed_at_any_step_of_the_way_back_the_next_call_goes_on(memory):
    for at in range(200):
        tree = Tree(memory / str(at))
        tree.run(OLD, GOES)
        (tree.root / KEY.lstrip("/")).write_text("old key")
        tree.prepare([NEW, COMES], [GOES.unit], [File(KEY, b"new key", mode=0o600, secret=True)])
        tree.ask("switch", id="u1", seconds=10)
        died = killed(tree, at, "restore", id="u1", seconds=10)

        assert tree.ask("restore", id="u1", seconds=10)["problem"] is None
        assert is_old(tree), f"killed before event {at}"
        if not died:
            break
    assert at > 10


# -- lock and marks --------------------------------------------------------------------------------


def lock(tree, upgrade, **more) -> LockAnswer:
    asked = {"id": upgrade, "owner": f"{upgrade}@x", "origin": "/x", "what": "0.33", **more}
    return LockAnswer.read("n", tree.ask("lock", **asked))


def test_one_upgrade_has_the_lock_and_whoever_steals_it_learns_from_whom(tree):
    assert lock(tree, "u1").ours
    assert lock(tree, "u1").ours

    refused = lock(tree, "u2")
    assert (refused.ours, refused.lock.id, refused.lock.owner) == (False, "u1", "u1@x")

    stolen = lock(tree, "u2", steal=True)
    assert (stolen.ours, stolen.before.id, stolen.lock.id) == (True, "u1", "u2")

    assert not LockAnswer.read("n", tree.ask("unlock", id="u1")).ours
    assert LockAnswer.read("n", tree.ask("unlock", id="u2")).lock is None
    assert LockAnswer.read("n", tree.ask("unlock", id="u2")).ours


def marked(tree, do, **asked) -> Marks:
    return Marks.read("n", tree.ask(do, **asked))


HUMAN = {"by": "ann@x", "why": "disk", "upgrade": None}
UPGRADE = {"by": "bob@y", "why": "wave 1", "upgrade": "u1"}


def test_what_a_person_cordoned_no_upgrade_lifts(tree):
    marked(tree, "cordon", **HUMAN)

    assert marked(tree, "cordon", **UPGRADE).changed == ()
    left = marked(tree, "uncordon", upgrade="u1")

    assert left.cordon.by == "ann@x"
    assert "stays" in left.problem
    assert marked(tree, "uncordon").cordon is None


def test_a_persons_word_takes_the_place_of_an_upgrades(tree):
    marked(tree, "cordon", **UPGRADE)
    marked(tree, "cordon", **HUMAN)

    assert marked(tree, "uncordon", upgrade="u1").cordon.why == "disk"


def test_an_upgrades_mark_is_lifted_by_it_or_knowingly(tree):
    marked(tree, "cordon", **UPGRADE)

    assert "--force" in marked(tree, "uncordon").problem
    assert marked(tree, "uncordon", upgrade="u2").cordon is not None
    assert marked(tree, "uncordon", upgrade="u1").cordon is None
    marked(tree, "cordon", **UPGRADE)
    assert marked(tree, "uncordon", force=True).cordon is None


def test_drains_are_marks_of_replicas_by_the_same_rules(tree):
    marked(tree, "drain", replicas=["a-0", "b-0"], **UPGRADE)
    marked(tree, "drain", replicas=["b-0"], **HUMAN)

    left = marked(tree, "undrain", replicas=["a-0", "b-0"], upgrade="u1")

    assert left.changed == ("a-0",)
    assert list(left.drained) == ["b-0"]
    assert marked(tree, "undrain", replicas=["b-0", "c-0"]).drained == {}


@pytest.mark.parametrize("name", ["../../x", "", ".hidden", "a b"])
def test_a_name_is_no_path(tree, name):
    assert marked(tree, "drain", replicas=[name], **HUMAN).problem


def test_what_is_secret_is_roots_alone(tree):
    tree.ask("switch", id="u1", seconds=10)
    marked(tree, "cordon", **HUMAN)

    kept = tree.root / HOME / "kept/u1/files"
    assert {path.stat().st_mode & 0o777 for path in kept.iterdir()} == {0o600}
    assert (tree.root / HOME).stat().st_mode & 0o777 == 0o700
    assert (tree.root / KEY.lstrip("/")).stat().st_mode & 0o777 == 0o600


# -- look ------------------------------------------------------------------------------------------


def test_a_look_says_what_differs_before_and_after(tree):
    found = NodeLook.read("n", tree.ask("look"))
    assert found.problem is None
    assert found.units[OLD.unit].is_running_with(OLD.fingerprint)

    tree.ask("switch", id="u1", seconds=10)

    found = NodeLook.read("n", tree.ask("look"))
    assert found.kept["u1"].units == {
        OLD.unit: OLD.fingerprint,
        GOES.unit: GOES.fingerprint,
        COMES.unit: None,
    }
    assert found.boot_id == "9e6f4b524c0e"


def test_an_operators_own_unit_is_not_ours(tree):
    (tree.root / UNITS / "vllm-router.service").write_text("[Service]\nExecStart=/bin/router\n")

    assert "vllm-router.service" not in NodeLook.read("n", tree.ask("look")).units


# -- releases --------------------------------------------------------------------------------------

DAY = 86400


def test_what_is_used_stays_and_of_the_rest_the_newest_and_the_young():
    found = [
        Release("used", True, 0, ["vllm-a-0.service"]),
        Release("old", True, 10 * DAY, []),
        Release("newer", True, 20 * DAY, []),
        Release("newest", True, 30 * DAY, []),
        Release("young", True, 98 * DAY, []),
        Release("half", False, 40 * DAY, []),
    ]

    stays = releases.kept_releases(found, keep=2, days=14, now=100 * DAY)

    assert set(stays) == {"used", "young", "newest"}
    assert set(releases.kept_releases(found, 3, 1, 100 * DAY)) == {
        "used", "young", "newest", "newer",
    }  # fmt: skip


def test_kept_units_go_when_they_are_old_and_not_the_last_nor_the_lock_holders():
    sets = [KeptUnits(str(day), day * DAY, set()) for day in (1, 2, 3, 99)]

    assert releases.stale_sets(sets, 1, 14, 100 * DAY, locked="2") == ["1", "3"]


def release(tree: Tree, name: str, days: float) -> Path:
    folder = tree.root / "opt/vllm/releases" / name
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/vllm").write_text("x" * 9000)
    (folder / ".complete").touch()
    at = change.time.time() - days * DAY
    os.utime(folder / ".complete", (at, at))
    return folder


def test_no_release_goes_that_a_unit_a_kept_or_a_next_set_or_a_process_names(tree):
    tree.ask("switch", id="u1", seconds=10, units=[NEW.unit])
    tree.prepare([unit("vllm-a-0.service", "next", "0.34.0-cccccccccc")])
    names = (
        "0.32.0-aaaaaaaaaa",
        "0.33.0-bbbbbbbbbb",
        "0.34.0-cccccccccc",
        "0.1-mapped",
        "0.2-gone",
    )
    for name in names:
        release(tree, name, days=100)
    (tree.root / "proc/77").mkdir()
    (tree.root / "proc/77/maps").write_text("7f00 r-xp /opt/vllm/releases/0.1-mapped/lib/x.so\n")
    found = CollectAnswer.read("n", tree.ask("collect", keep=0, days=1))

    assert found.removed == ("0.2-gone",)
    assert found.freed_bytes > 0
    left = {path.name for path in (tree.root / "opt/vllm/releases").iterdir()}
    assert left == set(names) - {"0.2-gone"}


def test_killed_while_releases_go_none_is_left_half_there(memory):
    for at in range(60):
        tree = Tree(memory / str(at))
        for name in ("0.1-one", "0.2-two"):
            release(tree, name, days=100)
        died = killed(tree, at, "collect", keep=0, days=1)

        for path in (tree.root / "opt/vllm/releases").iterdir():
            if not path.name.startswith("."):
                assert (path / "bin/vllm").exists()
        tree.ask("collect", keep=0, days=1)
        assert list((tree.root / "opt/vllm/releases").iterdir()) == []
        if not died:
            break
    assert at > 5


def test_requests_are_counted_over_all_engines_of_a_server():
    from gpufleet.on_node.change import wait

    page = (
        'vllm:num_requests_running{engine="0",model_name="m"} 2.0\n'
        'vllm:num_requests_running{engine="1",model_name="m"} 1.0\n'
        'vllm:num_requests_waiting{engine="0",model_name="m"} 4.0\n'
        'vllm:num_requests_waiting_by_reason{engine="0"} 9.0\n'
    )
    assert wait.parse_requests(page, _GAUGES) == 7
    assert wait.parse_requests("# a page of something else\n", _GAUGES) is None


def test_the_same_plan_is_the_same_bytes_and_no_secret_has_a_hash(tree):
    def manifest() -> dict:
        return json.loads((tree.root / HOME / "next/manifest.json").read_text())

    first = manifest()
    tree.prepare([COMES, NEW], [GOES.unit], [File(KEY, b"new key", mode=0o600, secret=True)])

    assert manifest() == first
    assert hashlib.sha256(b"new key").hexdigest() not in json.dumps(first)
    tree.prepare([NEW], [GOES.unit])
    assert manifest()["plan"] != first["plan"]
    assert read_next.__doc__

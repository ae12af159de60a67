"""Programs sent to nodes: nothing shown, nothing changed on the way."""

from __future__ import annotations

import ast
import functools
import marshal
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from gpufleet.remote import payload
from gpufleet.remote.payload import Payload
from tests.support.checkout import ROOT
from tests.support.rows import each_row

ON_NODE = ROOT / "src/gpufleet/on_node"


@each_row("shown", [repr, str, "{}".format, "{!r:>40}".format, "%s".__mod__, lambda p: f"{[p]}"])
def test_no_way_of_printing_shows_what_travels(shown):
    """pyinfra prints the arguments of facts with -v and --debug; parameters may be secrets."""
    text = shown(Payload("hunter2\n"))

    assert "hunter2" not in text
    assert "program of 8 characters" in text


def test_what_is_sent_is_the_whole_text():
    """The ways in which pyinfra and subprocess write a str keep the content."""
    program = Payload("print('sent')\n")

    assert program.encode() == b"print('sent')\n"
    done = subprocess.run(
        [sys.executable, "-"], input=program, capture_output=True, text=True, check=True
    )
    assert done.stdout == "sent\n"


def test_a_program_ends_with_a_newline():
    """Otherwise pyinfra appends one by formatting, which would send the disguise instead."""
    assert payload.program("probe/probe", nvml=True).endswith("\n")


def test_secrets_are_not_in_the_text_as_they_are():
    """So that no part of it that is cut out and printed (an error's context) shows them."""
    program = payload.program("probe/probe", key="hunter2-hunter2-hunter2")

    assert "hunter2" not in program.encode().decode()


def test_an_unknown_program_is_a_mistake_of_ours():
    with pytest.raises(FileNotFoundError):
        payload.program("no-such-program")


def test_a_program_is_compiled_once_where_there_is_a_directory_for_it(tmp_path: Path) -> None:
    """What is kept is used, by its hash; what a power cut has left of it is written anew."""
    kept = tmp_path / "code"
    kept.mkdir(mode=0o700)
    first = ran(kept)
    files = {path: path.read_bytes() for path in kept.iterdir()}
    assert first == ran(kept)
    assert len(files) > 1
    assert {path: path.read_bytes() for path in kept.iterdir()} == files

    torn, foreign = list(files)[:2]
    torn.write_bytes(files[torn][:-100])
    foreign.write_bytes(bytes(len(files[foreign])))
    assert first == ran(kept)
    assert {path: path.read_bytes() for path in kept.iterdir()} == files


def test_kept_code_is_what_runs(tmp_path: Path) -> None:
    """Otherwise the test above would hold of a program that keeps and does not look."""
    kept = tmp_path / "code"
    kept.mkdir(mode=0o700)
    ran(kept)
    code = marshal.dumps(compile("print('kept')", "x", "exec"))
    for path in kept.iterdir():
        path.write_bytes(zlib.crc32(code).to_bytes(4, "big") + code)
    assert ran(kept).endswith("kept\n")


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o707])
def test_nothing_is_kept_where_others_could_read_or_write(tmp_path: Path, mode: int) -> None:
    kept = tmp_path / "code"
    kept.mkdir()
    kept.chmod(mode)
    ran(kept)
    assert list(kept.iterdir()) == []


def test_without_a_directory_nothing_is_left(tmp_path: Path) -> None:
    ran(tmp_path / "code")
    assert list(tmp_path.iterdir()) == []


def test_without_its_source_a_program_runs_where_it_is_kept(tmp_path: Path) -> None:
    kept = tmp_path / "code"
    kept.mkdir(mode=0o700)
    whole = ran(kept)
    assert run(kept, SNAPSHOT.brief).stdout == whole
    assert len(SNAPSHOT.brief) < 4000


def test_without_its_source_a_program_that_is_not_kept_does_nothing(tmp_path: Path) -> None:
    """Whichever part is missing, or torn: the status says it, before anything is asked."""
    kept = tmp_path / "code"
    nothing = run(kept, SNAPSHOT.brief)
    assert (nothing.returncode, nothing.stdout, nothing.stderr) == (payload.KEEPS_NOTHING, "", "")
    kept.mkdir(mode=0o700)
    ran(kept)
    for path in kept.iterdir():
        code = path.read_bytes()
        path.write_bytes(code[:-9])
        torn = run(kept, SNAPSHOT.brief)
        path.unlink()
        missing = run(kept, SNAPSHOT.brief)
        path.write_bytes(code)
        for done in (torn, missing):
            assert (done.returncode, done.stdout, done.stderr) == (payload.LACKS, "", "")


def test_what_is_sent_without_source_shows_no_parameters_either() -> None:
    program = payload.program("probe/probe", key="hunter2-hunter2-hunter2")
    assert "hunter2" not in program.brief.encode().decode()
    assert "hunter2" not in repr(program.brief)


SNAPSHOT = payload.program("converge/snapshot", asked=[["group", "root"]])


def ran(kept: Path) -> str:
    """Run a program that would keep its code in `kept`; return what it printed."""
    done = run(kept, SNAPSHOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run(kept: Path, sent: Payload | None) -> subprocess.CompletedProcess[str]:
    assert sent is not None
    program = sent.encode().decode()
    assert program.count(payload.CODE) == 1
    return subprocess.run(
        [sys.executable, "-I", "-"],
        input=program.replace(payload.CODE, str(kept)),
        capture_output=True,
        text=True,
        check=False,
    )


@functools.cache
def parsed(name: str) -> frozenset[str]:
    """Return the files of on_node that one imports anywhere, as Python's parser finds them."""
    found: set[str] = set()
    for node in ast.walk(ast.parse((ON_NODE / f"{name}.py").read_text())):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("gpufleet.on_node"):
            module = str(node.module).replace(".", "/").removeprefix("gpufleet/on_node").lstrip("/")
            if (ON_NODE / f"{module}.py").is_file():
                found.add(module)
            else:
                found |= {f"{module}/{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            assert not any(alias.name.startswith("gpufleet") for alias in node.names), name
    return frozenset(found)


FILES = sorted(
    str(path.relative_to(ON_NODE).with_suffix("")) for path in ON_NODE.glob("*/[!_]*.py")
)


@each_row("name", FILES)
def test_whatever_a_program_imports_travels_along_and_nothing_else(name: str) -> None:
    wanted, unread = set(), {name}
    while unread:
        new = parsed(unread.pop()) - wanted
        wanted |= new
        unread |= new
    carried = payload.imported_modules(name)
    assert set(carried) == {f"gpufleet.on_node.{each.replace('/', '.')}" for each in wanted}


def test_every_program_that_is_named_exists() -> None:
    """A program's name is a string: a file that is renamed would be missed on a node only."""
    named = set()
    for folder in ("src", "roles", "deploys", "lab", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            for node in ast.walk(ast.parse(text)) if "payload" in text else ():
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Attribute)
                    and node.func.attr in {"program", "archive", "digest"}
                    and isinstance(node.func.value, ast.Name)
                    and node.func.value.id == "payload"
                    and isinstance(node.args[0], ast.Constant)
                ):
                    named.add(node.args[0].value)
    assert len(named) > 30
    assert named - set(FILES) == set()

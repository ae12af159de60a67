"""Help and completion: one line a command, in one of a few groups, and names that are offered."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from gpufleet.cli.main import COMMANDS, GROUPS, gpufleet
from gpufleet.console import add_row, display, new_table
from tests.support import warm_command
from tests.support.checkout import ROOT
from tests.support.rows import each_row

GPUFLEET = str(Path(sys.executable).with_name("gpufleet"))
EXAMPLE = "examples/explained/inventories/prod.py"


def walk(command: click.Command, name: str = "") -> dict[str, click.Command]:
    """{name: command} of all that can be typed."""
    if not isinstance(command, click.Group):
        return {name: command}
    context = click.Context(command)
    found = {}
    for each in command.list_commands(context):
        below = command.get_command(context, each)
        assert below
        found |= walk(below, f"{name} {each}".strip())
    return found


ALL = walk(gpufleet)


def test_every_command_is_in_one_group():
    grouped = [name for names in GROUPS.values() for name in names]

    assert sorted(grouped) == sorted(COMMANDS)


@each_row("name", sorted(COMMANDS))
def test_a_command_has_one_line_of_less_than_sixty_characters_in_both_helps(name):
    line = COMMANDS[name][1]
    command = gpufleet.get_command(click.Context(gpufleet), name)

    assert command
    assert (command.help or "").strip().splitlines()[0] == line
    assert len(line) < 60


def test_the_help_fits_eighty_columns_and_has_the_groups_in_their_order():
    run = subprocess.run(
        [GPUFLEET, "--help"],
        env=os.environ | {"COLUMNS": "80"},
        capture_output=True,
        text=True,
        check=True,
    )

    lines = run.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    titles = [line.removesuffix(":") for line in lines if line.removesuffix(":") in GROUPS]
    assert titles == list(GROUPS)
    for line in (each for _, each in COMMANDS.values()):
        assert line in run.stdout


# Commands that change something, run a program, or print a document for programs as it is.
NOT_READ = {
    *("bundle", "completion", "deploy", "docs", "flags extract", "import", "init", "lock"),
    *("monitoring render", "monitoring silence", "monitoring unsilence", "packages lock"),
    *("lab clean", "lab demo", "lab down", "lab fault", "lab net", "lab power", "lab purge"),
    *("lab require-root", "lab ssh", "lab up", "lab vendor"),
}


@each_row("name", sorted(ALL.keys() - NOT_READ))
def test_a_command_that_reads_prints_json_where_it_is_asked(name):
    assert any("--json" in option.opts for option in ALL[name].params)


def test_no_command_is_excused_that_there_is_not():
    assert ALL.keys() >= NOT_READ


# Completion


def offered(*words: str, folder: Path = ROOT) -> list[str]:
    """Return what a shell is offered for the last of the words."""
    run = warm_command.run(
        [],
        cwd=folder,
        env=os.environ
        | {
            "_GPUFLEET_COMPLETE": "bash_complete",
            "COMP_WORDS": " ".join(["gpufleet", *words]),
            "COMP_CWORD": str(len(words)),
        },
    )
    assert run.stderr == ""
    return [line.partition(",")[2] for line in run.stdout.split()]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["val"], ["validate"]),
        (["check", "inventories/lo"], ["inventories/local.py"]),
        (["inventory", EXAMPLE, "gpu-a"], ["gpu-a100-01", "gpu-a100-02"]),
        (["logs", EXAMPLE, "qwen3-8"], ["qwen3-8b-0"]),
        (["plan", EXAMPLE, "--as", "gpu_a"], ["gpu_a100="]),
        (["plan", EXAMPLE, "--as", "gpu_a100=gb"], ["gpu_a100=gb200x4"]),
        (["presets", "mem"], ["memory-constrained"]),
        (["size", "m/m", "--gpu", "H20"], ["H20", "H200"]),
        (["settings", "vllm.api"], ["vllm.api_key_file"]),
        # A mistake in an inventory is not the shell's business.
        (["inventory", "inventories/nope.py", "g"], []),
    ],
    ids=lambda given: " ".join(given[:1]),
)
def test_a_shell_is_offered_what_there_is(words, found):
    assert set(found) <= set(offered(*words))
    if not found:
        assert offered(*words) == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell_asks_this_command(shell):
    run = warm_command.run(["completion", shell])

    assert f"_GPUFLEET_COMPLETE={shell}_complete" in run.stdout


# Tables


def test_a_flag_is_never_broken_in_a_table(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    flag = "--disable-uvicorn-access-log"
    table = new_table("model", "flag", "value", "set by", "because", whole={"flag"})
    for width in (30, 200):
        others = ("m" * width, "v" * width, "s" * width)
        add_row(table, others[0], flag, *others[1:], "a line for every probe " * 6)

    display(table)

    lines = click.unstyle(capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(flag in line for line in lines) == 2

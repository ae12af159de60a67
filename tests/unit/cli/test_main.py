"""The `gpufleet` command as operators run it: what it prints, and how it says no."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import click
import pytest

from gpufleet.cli.main import COMMANDS
from gpufleet.cli.strict_command import StrictCommand
from tests.support import warm_command
from tests.support.checkout import ROOT
from tests.support.rows import each_row

NODES = ROOT / "src/gpufleet/catalog/data/nodes"
EXPLAINED = ROOT / "examples/explained"
PROD = EXPLAINED / "inventories/prod.py"
GPUFLEET = Path(sys.executable).with_name("gpufleet")

SERVING = """\
vllm: {version: 0.32.0, lock: locks/x.txt, listen: 127.0.0.1}
serving:
  pair: {model: /srv/pair, tensor_parallel: 2, replicas: 2}
"""


def gpufleet(*arguments: object, cwd: Path = ROOT, **environment: str):
    return warm_command.run(arguments, cwd=cwd, env=os.environ | environment)


def refused(run) -> list[str]:
    """Return the problems that a command ended with: on stderr, status 2, no traceback."""
    assert run.returncode == 2, run.stderr
    assert run.stdout == ""
    assert "Traceback" not in run.stderr
    return run.stderr.splitlines()


@pytest.fixture
def serving(tmp_path):
    path = tmp_path / "serving.yml"
    path.write_text(SERVING)
    return path


# -- inventory -------------------------------------------------------------------------------------


def test_every_value_is_shown_with_the_line_that_sets_it():
    """Checked against the files themselves: the line shown is the one that has the key."""
    run = gpufleet("inventory", PROD, "gpu-a100-02", "--json")
    assert run.returncode == 0, run.stderr
    values = json.loads(run.stdout)["nodes"]["gpu-a100-02"]["values"]

    set_in = {key: each["set_in"] for key, each in values.items() if each["set_in"] != "default"}
    assert len(set_in) > 10
    for key, place in set_in.items():
        file, line = place.split(":")
        text = (EXPLAINED / file).read_text().splitlines()[int(line) - 1]
        assert key.rsplit(".", maxsplit=1)[-1] in text, f"{key} at {place}"
    assert values["gpus.count"]["set_in"].startswith("host_vars/gpu-a100-02.yml:")
    assert values["dcgm.port"] == {"value": 9400, "set_in": "default"}


def test_changed_shows_only_what_is_written_with_its_line():
    whole = gpufleet("inventory", PROD, "gpu-a100-02", "--json")
    run = gpufleet("inventory", PROD, "gpu-a100-02", "--changed", "--json")
    assert run.returncode == 0, run.stderr
    values = json.loads(run.stdout)["nodes"]["gpu-a100-02"]["values"]
    every = json.loads(whole.stdout)["nodes"]["gpu-a100-02"]["values"]

    assert "default" not in {each["set_in"] for each in values.values()}
    assert values.items() <= every.items()
    assert values["gpus.count"]["set_in"].startswith("host_vars/gpu-a100-02.yml:")
    assert " default" not in gpufleet("inventory", PROD, "--changed").stdout


def test_the_table_says_for_which_nodes_a_value_holds():
    run = gpufleet("inventory", PROD)

    rows = [line.split() for line in run.stdout.splitlines()]
    assert ["gpus.count", "4", "group_vars/gpu_a100.yml:4", "gpu-a100-01"] in rows
    assert ["ssh_user", "root", "group_vars/prod.yml:4", "all"] in rows


def test_a_table_for_a_program_has_no_folded_lines():
    run = gpufleet("inventory", PROD, "gpu-a100-01", COLUMNS="40")

    assert "d2a6b11c096396d868758b86dab1823b25e14d70333f1dfa74da5ddaf6a06dba" in run.stdout


# -- plan ------------------------------------------------------------------------------------------


def test_a_plan_for_saved_probes_needs_no_node(serving):
    run = gpufleet("plan", "--vars", serving, "--nodes", NODES / "a100x4-pcie.json", "--json")

    stages = json.loads(run.stdout)["stages"]
    assert [(stage["node"], stage["gpus"]) for stage in stages] == [
        ("a100x4-pcie", [0, 1]),
        ("a100x4-pcie", [2, 3]),
    ]


def test_the_plans_table_shows_the_island_that_a_stage_is_in(serving):
    run = gpufleet("plan", "--vars", serving, "--nodes", NODES / "a100x4-pcie.json")

    rows = [line.split() for line in run.stdout.splitlines()]
    assert rows[1] == ["a100x4-pcie", "pair", "0", "0-1", "0-1", "2", "8000"]
    assert rows[2] == ["pair", "1", "2-3", "2-3", "2", "8001"]
    assert "pair: 2 replicas" in run.stdout


def test_probes_of_many_nodes_may_be_one_file(serving, tmp_path):
    """What `gpufleet probe --json` prints: {node: its probe}."""
    recorded = (NODES / "h100x8.json").read_text()
    # Another machine's GPUs have UUIDs of their own.
    both = {"n1": json.loads(recorded), "n2": json.loads(recorded.replace('"GPU-', '"GPU-2'))}
    (tmp_path / "probes.json").write_text(json.dumps(both))

    run = gpufleet("plan", "--vars", serving, "--nodes", tmp_path / "probes.json", "--json")

    assert {stage["node"] for stage in json.loads(run.stdout)["stages"]} == {"n1", "n2"}


# -- how it says no --------------------------------------------------------------------------------


def test_a_mistake_is_one_line_with_file_and_key(serving):
    serving.write_text(SERVING.replace("replicas", "replica"))

    (line,) = refused(gpufleet("plan", "--vars", serving, "--nodes", NODES / "t4x1.json"))

    assert line == (
        f"error: {serving}:3: serving.pair.replica: no setting has this name; did you mean "
        "'replicas'?"
    )


@each_row(
    ("arguments", "says"),
    [
        (("inventory", "inventories/prd.py"), "no such inventory file"),
        (("inventory", PROD, "gpu-a100-1"), "did you mean 'gpu-a100-01'"),
        (
            ("plan", "--vars", "nope.yml", "--nodes", NODES / "t4x1.json"),
            "nope.yml: cannot be read",
        ),
        (("plan", "--vars", "x.yml", "--nodes", "nope.json"), "nope.json: cannot be read"),
        (("plan", "--vars", "x.yml", "--nodes", "pyproject.toml"), "pyproject.toml:1: is not JSON"),
        (("plan", "--vars", "x.yml", "--nodes", NODES / "t4x1.json", "--json"), "x.yml"),
        (("plan",), "INVENTORY is missing, and there are inventories/lab.py"),
        (("plan", PROD, "--nodes", NODES / "t4x1.json"), "has no 't4x1'"),
        (("probe", PROD, "--limit", "gpu_h10"), "did you mean 'gpu_h100'"),
        (("nonsense",), "No such command"),
    ],
)
def test_mistakes_end_in_a_sentence(arguments, says):
    assert says in "\n".join(refused(gpufleet(*arguments)))


def test_a_file_s_own_words_do_not_reach_the_terminal_raw(tmp_path):
    """An escape sequence in a config.json would rewrite what the operator reads."""
    (tmp_path / "config.json").write_text('{"architectures": ["\\u001b[2JEvil"]}')

    (line,) = refused(gpufleet("size", tmp_path, "--gpu", "H100"))

    assert r"\x1b[2JEvil" in line


def test_too_little_hardware_says_what_to_change(serving):
    lines = refused(gpufleet("plan", "--vars", serving, "--nodes", NODES / "t4x1.json"))

    assert all(line.startswith("error: ") for line in lines)
    assert "tensor_parallel" in "\n".join(lines)


def test_an_inventory_with_mistakes_names_them_all(tmp_path):
    for name, text in {
        "inventories/x.py": "from gpufleet import inventory\n"
        'globals().update(inventory.load(__file__, groups={"gpu": ["n1"]}))\n',
        "group_vars/gpu.yml": "modles: {}\nnode_exporter: {port: 0}\n",
    }.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)

    lines = refused(gpufleet("inventory", "inventories/x.py", cwd=tmp_path))

    assert [line.split(": ")[1] for line in lines] == [
        "group_vars/gpu.yml:1",
        "group_vars/gpu.yml:2",
    ]


@each_row("name", sorted(COMMANDS))
def test_every_command_of_the_table_is_there(name):
    module, _, attribute = COMMANDS[name][0].partition(":")
    found = getattr(import_module(module), attribute)

    assert isinstance(found, click.Command)
    assert found.name == name


def test_help_loads_nothing_that_it_does_not_need():
    """So that it answers at once, and also where pyinfra cannot be imported."""
    code = (
        "import sys; from gpufleet.cli.main import main; sys.argv = ['gpufleet', '--help']; main();"
        "slow = {'pyinfra', 'pydantic', 'gevent', 'rich', 'yaml', 'lab'};"
        "print(sorted(slow & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert "lab " in run.stdout
    assert run.stdout.splitlines()[-1] == "[]"


def test_an_interrupted_probe_ends_at_once_and_not_with_0(tmp_path):
    """A node that accepts the connection and then says nothing is no reason to wait."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        (tmp_path / "inventories").mkdir()
        (tmp_path / "inventories/x.py").write_text(
            "from gpufleet import inventory\n"
            'globals().update(inventory.load(__file__, groups={"gpu": [("n1", {"ssh_port": '
            f'{silent.getsockname()[1]}, "ssh_hostname": "127.0.0.1"}})]}}))\n'
        )
        run = subprocess.Popen(
            [GPUFLEET, "probe", "inventories/x.py"], cwd=tmp_path, stderr=subprocess.PIPE, text=True
        )
        silent.settimeout(30)
        connected, _ = silent.accept()
        with connected, run:
            run.send_signal(signal.SIGINT)
            said = run.stderr.read()
            run.wait(timeout=60)

    assert run.returncode == 130, said
    assert "Interrupted." in said
    assert "Traceback" not in said
    assert "KeyboardInterrupt" not in said


def test_the_labs_commands_are_there():
    run = gpufleet("lab", "--help")

    assert run.returncode == 0, run.stderr
    assert "status" in run.stdout


# -- options that are given twice ------------------------------------------------------------------


def _leaves(command: click.Command) -> Iterator[click.Command]:
    if isinstance(command, click.Group):
        for each in command.commands.values():
            yield from _leaves(each)
    else:
        yield command


def test_no_command_takes_the_last_of_two_values_in_silence():
    """But those of the lab, which are a checkout's and change its simulated nodes alone."""
    loose = set()
    for module, _ in COMMANDS.values():
        name, _, attribute = module.partition(":")
        if attribute == "lab":
            continue
        for leaf in _leaves(getattr(import_module(name), attribute)):
            single = [
                each
                for each in leaf.params
                if isinstance(each, click.Option) and not (each.is_flag or each.multiple)
            ]
            if single and not isinstance(leaf, StrictCommand):
                loose.add(leaf.name)
    assert loose == set()


@each_row(
    ("words", "option"),
    [
        (("size", "m", "--gpu", "H100", "--gpu", "L4"), "--gpu"),
        (("size", "m", "-tp", "2", "--tensor-parallel-size=4"), "--tensor-parallel-size"),
        (("plan", PROD, "--models", ".", "--models", "/tmp"), "--models"),
    ],
)
def test_an_option_that_is_given_twice_is_refused(words, option):
    problems = refused(gpufleet(*words))
    assert problems[-1] == f"Error: {option} is given 2 times: write {option} only once"


def test_a_switch_and_an_option_that_collects_may_be_given_twice():
    run = gpufleet("plan", PROD, "--as", "h100x8", "--as", "gpu_a100=a100x8", "--json", "--json")
    assert "is given" not in run.stderr

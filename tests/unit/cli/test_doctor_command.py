"""`gpufleet doctor`: what it prints, its statuses, and what it refuses."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpufleet.cli.doctor_command import doctor
from gpufleet.errors import FleetError
from tests.support import warm_command
from tests.support.rows import each_row

OOM = "(Worker_TP1 pid=2) ERROR 11-20 10:00:00 [w.py:1] torch.OutOfMemoryError: CUDA out of memory"


def run(*words: object, given: str = "") -> tuple[int, str]:
    result = CliRunner().invoke(doctor, [*map(str, words)], input=given, standalone_mode=False)
    if result.exception:
        raise result.exception
    return result.return_value, result.output


def test_a_log_with_a_failure_is_explained_and_the_status_is_1(tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    log.write_text(f"{OOM}\n")
    status, text = run(log)
    assert status == 1
    assert text.startswith("cause: mem-torch-oom, cuda\n")
    assert f"{log}:1, " in text
    assert "torch.OutOfMemoryError: CUDA out of memory" in text
    assert "what to do: " in text
    assert "command: gpufleet check" in text


def test_a_healthy_log_is_status_0(tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    log.write_text("(APIServer pid=1) INFO:     Application startup complete.\n")
    assert run(log) == (0, f"nothing found in {log} (1 line)\n")


def test_an_exception_that_no_rule_explains_is_status_2() -> None:
    status, text = run("-", given="(APIServer pid=1) ValueError: something new.\n")
    assert status == 2
    assert text.startswith("unknown: something failed, but no rule explains it\n")
    assert "ValueError: something new." in text


@each_row("options", [(), ("--json",)])
def test_keys_in_a_log_are_not_printed(options: tuple[str, ...]) -> None:
    arguments = (
        "[2026-11-29 11:18:26] server_args={'api_key': 'lab-key-01', 'admin_api_key': 'adm'}"
    )
    error = "sglang serve: error: unrecognized arguments: --api_key lab-key-01"
    traceback = f"Traceback (most recent call last):\nValueError: {arguments}"
    for given in (f"{arguments}\n{error}\n", f"{traceback}\n"):
        _, text = run("-", *options, given=given)
        assert "not shown" in text
        assert "lab-key" not in text
        assert "adm" not in text.replace("admin_api_key", "")


@each_row("given", ["", "\n \n", "-- No entries --\n", "-- Boot 1f --\n-- No entries --\n"])
def test_a_log_without_a_line_is_not_healthy(given: str) -> None:
    with pytest.raises(FleetError, match="stdin: has no log lines, so gpufleet cannot know"):
        run("-", given=given)


def test_of_several_logs_the_empty_one_is_named_unless_another_has_the_cause(
    tmp_path: Path,
) -> None:
    empty, full = tmp_path / "empty.log", tmp_path / "full.log"
    empty.write_text("")
    full.write_text("(APIServer pid=1) INFO:     Application startup complete.\n")
    with pytest.raises(FleetError) as error:
        run(full, empty)
    assert [each.partition(":")[0] for each in error.value.problems] == [str(empty)]
    full.write_text(f"{OOM}\n")
    assert run(full, empty)[0] == 1


def test_stdin_and_files_are_joined(tmp_path: Path) -> None:
    log = tmp_path / "kernel.log"
    log.write_text("2025-11-20T10:00:00+00:00 n kernel: Out of memory: Killed process 1 (VLLM)\n")
    status, text = run("-", log, "--json", given=f"2025-11-20T09:00:00Z {OOM}\n")
    value = json.loads(text)
    assert status == 1
    assert [each["rule"] for each in value["causes"]] == ["mem-torch-oom", "host-oom"]
    assert value["read"] == {"stdin": 1, str(log): 1}


@each_row(
    ("word", "says"),
    [
        ("none.log", "No such file or directory: write the name of a log"),
        (".", "is a directory"),
        ("\0", "cannot be read"),
        ("a" * 5000, "cannot be read: File name too long"),
    ],
)
def test_what_is_no_log_is_refused_with_what_to_write(word: str, says: str) -> None:
    with pytest.raises(FleetError, match=says):
        run(word)


def test_an_inventory_behind_a_log_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    log.write_text("x\n")
    with pytest.raises(
        FleetError,
        match="is an inventory: write the inventory as the first argument, and give no logs",
    ):
        run(log, "inventories/prod.py")


def test_all_that_is_no_log_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(FleetError) as error:
        run(tmp_path, tmp_path / "none", "-", "-")
    assert len(error.value.problems) == 3


def test_a_node_that_does_not_connect_is_not_reached_after_a_part_of_the_time(
    tmp_path: Path,
) -> None:
    """It takes connections and never says a word, as a machine whose disk hangs."""
    for name, text in {
        "inventories/prod.py": (
            "from gpufleet import inventory\n"
            "globals().update(inventory.load(__file__, groups={'gpu': ['gpu-01']}))\n"
        ),
        "group_vars/all.yml": "gpus: {}\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        (tmp_path / "host_vars").mkdir()
        (tmp_path / "host_vars/gpu-01.yml").write_text(
            f"ssh_hostname: 127.0.0.1\nssh_port: {port}\nssh_user: nobody\n"
        )
        words = ("doctor", "inventories/prod.py", "--json", "--seconds", "6")
        done = warm_command.run(words, cwd=tmp_path, timeout=100, connects=True)
    assert done.returncode == 1, done.stderr
    problems = json.loads(done.stdout)["problems"]
    assert ["not reached: no answer within 2 s" in each["what"] for each in problems] == [True], (
        problems
    )

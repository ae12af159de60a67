"""What a node is given to write facts of itself, and sentences about it."""

from __future__ import annotations

import io
import json
import zipfile
from dataclasses import FrozenInstanceError

import pytest

from gpufleet import node_paths
from gpufleet.converge.desired import Directory, File, Unit
from gpufleet.errors import FleetError
from gpufleet.fleet.draining import Drain, refusal
from gpufleet.fleet.dry_run import _execute, _NodeDryRun
from gpufleet.fleet.facts_timer import PROGRAM, TIMER, facts_state
from gpufleet.fleet.run import _has_key
from gpufleet.settings.parse import parse_settings

VLLM = {"version": "0.32.0", "lock": "x.txt", "allow_unauthenticated": True}


def test_the_program_of_facts_brings_the_binding_that_reads_gpus() -> None:
    """Nothing is installed on a node for it."""
    state = facts_state(parse_settings({}), 8)

    files = {each.path: each for each in state.values_of(File)}
    with zipfile.ZipFile(io.BytesIO(files[PROGRAM].content)) as archive:
        assert "pynvml.py" in archive.namelist()
    assert files[PROGRAM].mode == 0o755
    assert [each.name for each in state.values_of(Unit)] == [TIMER]
    assert {each.path: each.mode for each in state.values_of(Directory)}[node_paths.PROGRAMS] == (
        0o755
    )


@pytest.mark.parametrize(
    ("settings", "gpus"), [({}, 8), ({"gpus": {"count": 4}}, 4), ({"gpu_node": False}, None)]
)
def test_a_node_is_told_what_its_program_reads(
    settings: dict[str, object], gpus: int | None
) -> None:
    (told,) = [
        json.loads(each.content)
        for each in facts_state(parse_settings(settings), 8).values_of(File)
        if each.path == node_paths.FACTS_DECLARED
    ]

    assert told["schema"] == 1
    assert (told["gpu_node"], told["gpus"]) == (gpus is not None, gpus)
    assert told["release"] == ""


@pytest.mark.parametrize(
    ("vllm", "has"),
    [(None, False), (VLLM, False), (VLLM | {"cluster_key_file": "secrets/cluster-key"}, True)],
)
def test_a_node_has_a_cluster_key_only_where_vllm_names_one(
    vllm: dict[str, object] | None, has: bool
) -> None:
    assert _has_key(parse_settings({} if vllm is None else {"vllm": vllm})) is has


@pytest.mark.parametrize(
    ("last", "says"),
    [
        (("a",), "no other node serves a, so requests for this model would fail"),
        (("a", "b"), "no other node serves a, b, so requests for these models would fail"),
    ],
)
def test_a_drain_names_the_models_that_would_be_without_a_server(
    last: tuple[str, ...], says: str
) -> None:
    assert says in str(refusal(Drain("gpu-01", {}, (), last)))
    assert refusal(Drain("gpu-01", {}, (), ())) is None


def test_what_a_drain_found_does_not_change() -> None:
    found = Drain("gpu-01", {"tiny-1": ("gpu-02",), "tiny-0": ("gpu-01", "gpu-02")}, (), ())

    assert found.replicas == ("tiny-0", "tiny-1")
    assert found.every_node == ("gpu-01", "gpu-02")
    assert found.replicas_on("gpu-01") == ("tiny-0",)
    assert found.replicas_on("gpu-02", ["tiny-1"]) == ("tiny-1",)
    with pytest.raises(FrozenInstanceError):
        found.node = "gpu-03"  # type: ignore[misc]


def test_an_operation_that_changes_without_a_word_is_named_and_one_that_says_it_is_quoted() -> None:
    look = _NodeDryRun("deploys/a.py")
    look.changes += ["would write /etc/a"]
    look.end_operation("Role | Configure", changes=True)
    look.end_operation("Role | Install", changes=True)
    look.end_operation("Role | Look", changes=False)

    assert [each.what for each in look.moved] == ["would write /etc/a", "Install"]


@pytest.mark.parametrize(
    ("raises", "says"),
    [
        ("OSError('no room')", ("no room",)),
        ("OSError()", ("OSError",)),
        ("EOFError()", ("EOFError",)),
        ("FleetError('one', 'two')", ("one", "two")),
    ],
)
def test_a_deploy_file_that_ends_early_says_why(raises: str, says: tuple[str, ...]) -> None:
    code = f"from gpufleet.errors import FleetError\nraise {raises}\n"

    assert _execute("a.py", compile(code, "a.py", "exec")) == says
    assert FleetError("one", "two").problems == ("one", "two")

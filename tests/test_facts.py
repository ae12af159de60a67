"""Facts through pyinfra's own API, on this machine: what arrives, and what an operator reads."""

from __future__ import annotations

import pytest
from pyinfra.api import Config, Inventory, State
from pyinfra.api.connect import connect_all, disconnect_all
from pyinfra.api.exceptions import FactProcessError
from pyinfra.context import ctx_host, ctx_state

from gpufleet import payload
from gpufleet.facts import GpuProbe
from lab import nvml


@pytest.fixture
def host():
    """This machine as pyinfra sees it."""
    inventory = Inventory((["@local"], {}))
    state = State(inventory, Config())
    local = inventory.get_host("@local")
    with ctx_state.use(state), ctx_host.use(local):
        connect_all(state)
        yield local
        disconnect_all(state)


def test_the_probe_is_one_command_away(host, tmp_path):
    found = host.get_fact(
        GpuProbe,
        _stdin=payload.program("probe", nvml=True),
        _timeout=60,
        _env={
            "LD_LIBRARY_PATH": str(nvml.build(tmp_path).parent),
            "GPUFLEET_NVML_PROFILE": str(nvml.profile("a100x4-pcie")),
        },
    )

    assert found["schema"] == 1
    assert [gpu["name"] for gpu in found["gpus"]] == ["NVIDIA A100 80GB PCIe"] * 4


def test_a_node_without_python_fails_with_a_sentence(host, capfd, caplog):
    """`{}` and a failed host: whoever asked must not mistake it for a node without GPUs."""
    found = host.get_fact(
        GpuProbe,
        _stdin=payload.program("probe"),
        _timeout=60,
        _env={"PATH": "/nonexistent"},
        _ignore_errors=True,
    )

    assert found == {}
    assert "no python3 on this node: install it" in caplog.text + "".join(capfd.readouterr())


def test_words_of_the_node_before_the_document_do_no_harm():
    assert GpuProbe().process(["Authorized users only.", '{"schema": 1}']) == {"schema": 1}


@pytest.mark.parametrize("output", [["Killed"], ["one", "two", "42"], ["[]"], []])
def test_what_is_no_document_is_quoted(output):
    """As the one exception that pyinfra turns into a failed host instead of an aborted run."""
    with pytest.raises(FactProcessError, match="the GPU probe printed") as error:
        GpuProbe().process(output)

    assert (output[-1] if output else "nothing") in str(error.value)

"""Which deploy file, which config.py and which inventory a command gets that names none."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpufleet.errors import FleetError
from gpufleet.inventory.pyinfra_command import (
    VARIABLE,
    default_inventory,
    deploy_file,
    pyinfra_command,
)
from gpufleet.paths import PROJECT


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Be in an empty directory, as an operator without a checkout is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(VARIABLE, raising=False)
    return tmp_path


def write(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).touch()


def test_the_only_inventory_is_the_default(here: Path) -> None:
    write(here, "inventories/fleet.py", "inventories/known_hosts")

    assert default_inventory() == "inventories/fleet.py"


def test_the_variable_names_the_inventory_before_the_only_one(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(here, "inventories/fleet.py")
    monkeypatch.setenv(VARIABLE, "/srv/ops/inventories/prod.py")

    assert default_inventory() == "/srv/ops/inventories/prod.py"


def test_of_several_inventories_none_is_the_default_and_all_are_named(here: Path) -> None:
    write(here, "inventories/a.py", "inventories/b.py")

    with pytest.raises(FleetError, match=r"inventories/a\.py, inventories/b\.py") as refused:
        default_inventory()
    assert VARIABLE in str(refused.value)


def test_without_an_inventory_it_is_said_how_to_get_one(here: Path) -> None:
    with pytest.raises(FleetError, match="gpufleet init DIR HOST"):
        default_inventory()


def test_a_deploy_of_this_directory_goes_before_the_one_of_gpufleet(here: Path) -> None:
    shipped = deploy_file("vllm")
    write(here, "deploys/vllm.py", "deploys/own.py")

    assert shipped == str(PROJECT / "deploys/vllm.py")
    assert deploy_file("vllm") == "deploys/vllm.py"
    assert deploy_file("own") == "deploys/own.py"
    assert deploy_file("node") == str(PROJECT / "deploys/node.py")


def test_an_unknown_deploy_is_refused_with_those_there_are_and_the_near_one(here: Path) -> None:
    write(here, "deploys/own.py")

    with pytest.raises(FleetError, match=r"node, own, .*did you mean 'vllm'\?$"):
        deploy_file("vlm")


def test_a_directory_without_a_config_gets_gpufleets_which_refuses_bad_command_lines(
    here: Path,
) -> None:
    without = pyinfra_command("vllm", "inventories/fleet.py", "--dry")
    write(here, "config.py")
    own = pyinfra_command("vllm", "inventories/fleet.py", "--dry")

    assert without[3:5] == ["--config", str(PROJECT / "config.py")]
    assert own[1:] == ["-m", "pyinfra", *without[5:]]
    assert without[5:] == ["inventories/fleet.py", "--dry", str(PROJECT / "deploys/vllm.py")]

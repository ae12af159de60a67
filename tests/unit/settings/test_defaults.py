"""What settings are when nobody writes them, and what is wrong with some that are written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from gpufleet.settings.base import Setting
from gpufleet.settings.firewall_settings import Firewall
from gpufleet.settings.gpu_lock import GpuLock, lock_objections
from gpufleet.settings.lock_defaults import differences
from gpufleet.settings.monitoring_settings import Receiver, Watchdog
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.serving_settings import Distribution, Served, Vllm
from tests.support.checkout import ROOT
from tests.support.rows import each_row
from tests.unit.settings.test_node_variables import checked

VLLM = {"version": "0.32.0", "lock": "locks/vllm.txt", "listen": "127.0.0.1"}


def test_a_node_has_gpus_and_gives_what_it_has_unless_it_is_said_otherwise() -> None:
    assert NodeSettings().gpu_node is True
    assert NodeSettings().vllm is None
    distribution = Vllm.model_validate(VLLM).distribution
    assert distribution == Distribution()
    assert (distribution.enabled, distribution.port, distribution.rate_mbit) == (True, 8790, None)


@each_row(
    ("page", "settings", "least"),
    [
        ("configure/serving", Served, 9),
        ("gpu-nodes/distribution", Distribution, 2),
        ("monitor/watchdog", Watchdog, 3),
        ("plan/multi-node", Served, 1),
        ("traffic/firewall", Firewall, 2),
    ],
)
def test_pages_name_the_defaults_that_settings_have(
    page: str, settings: type[Setting], least: int
) -> None:
    """Of values; not of words such as `planned`."""
    text = (ROOT / f"docs/{page}.md").read_text()
    table = text.partition("| key | default | meaning |\n")[2].partition("\n\n")[0]
    said: dict[str, Any] = {}
    for keys, cell in re.findall(r"^\| (`[^|]+) \| (`[^`]+`|[\d, ]+) \|", table, re.MULTILINE):
        values = yaml.safe_load(f"[{cell.strip('`')}]")
        said |= dict(zip(re.findall(r"`(\w+)`", keys), values, strict=True))
    fields = {name: each for name, each in settings.model_fields.items() if name in said}

    found = {name: each.get_default(call_default_factory=True) for name, each in fields.items()}

    assert len(found) >= least
    for name, default in found.items():
        value = said[name]
        if isinstance(default, Setting):
            value = type(default).model_validate(value)
        assert default == value, name


def test_nothing_changes_settings_after_they_were_read() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        NodeSettings().gpu_node = False


def toolkit(branch: str) -> dict[str, Any]:
    return {"profile": "full", "branch": branch, "version": f"{branch.replace('-', '.')}.0-1"}


@pytest.mark.parametrize(
    ("driver", "branch", "refused"),
    [
        ("580", "12-9", None),
        ("580", "13-0", None),
        ("580", "13-1", False),
        ("575", "12-9", None),
        ("575", "13-0", True),
    ],
)
def test_a_toolkit_of_a_newer_cuda_than_the_drivers_is_a_remark_and_of_a_newer_major_refused(
    driver: str, branch: str, refused: bool | None
) -> None:
    lock = GpuLock.model_validate({"driver": driver, "toolkit": toolkit(branch)})

    assert [each.refused for each in lock_objections(lock)] == (
        [] if refused is None else [refused]
    )


@pytest.mark.parametrize(
    ("cuda", "locked", "differ"),
    [
        ({"toolkit": "12-9"}, {"toolkit": toolkit("13-0")}, ["12-9"]),
        ({"toolkit": "13-0"}, {"toolkit": toolkit("13-0")}, []),
        ({"toolkit": "12-9"}, {}, []),
        ({}, {"toolkit": toolkit("13-0")}, []),
    ],
)
def test_what_the_lock_says_must_not_be_said_otherwise_beside_it(
    cuda: dict[str, Any], locked: dict[str, Any], differ: list[str]
) -> None:
    written = {"driver": "580.95.05", **locked}
    lock = GpuLock.model_validate(written)

    found = list(differences({"gpu_lock": written, "cuda": cuda}, lock))

    assert [each.value for each in found] == differ
    assert all("gpu_lock.toolkit.branch is 13-0" in str(each) for each in found)


@pytest.mark.parametrize(
    ("ways", "wrong"),
    [
        ({}, "receiver has no destination"),
        ({"slack_channel": "#gpus"}, "receiver has no destination"),
        ({"webhook_url_file": "a"}, None),
        ({"pagerduty_key_file": "a"}, None),
        ({"email_to": "a@example.net"}, None),
        ({"slack_url_file": "a"}, "is set, but `slack_channel`"),
        ({"slack_url_file": "a", "slack_channel": "#gpus"}, None),
    ],
)
def test_a_receiver_goes_somewhere(ways: dict[str, str], wrong: str | None) -> None:
    if wrong is None:
        Receiver.model_validate(ways)
        return
    with pytest.raises(ValidationError, match=wrong):
        Receiver.model_validate(ways)


def test_a_lock_is_found_from_the_projects_root_wherever_the_command_was_typed(
    tmp_path: Path,
) -> None:
    (tmp_path / "locks").mkdir()
    (tmp_path / "locks/vllm.txt").touch()
    found = checked(
        a={"vllm": VLLM}, b={"vllm": VLLM | {"lock": "locks/none.txt"}}, c={"gpus": {"count": 1}}
    )

    names = {name: each.from_root(tmp_path).settings.vllm for name, each in found.items()}

    assert names["a"]
    assert names["a"].lock == str(tmp_path / "locks/vllm.txt")
    assert names["b"]
    assert names["b"].lock == "locks/none.txt"
    assert names["c"] is None
    assert found["a"].from_root(Path.cwd()) is found["a"]


def test_a_nodes_variables_are_values_with_their_origins_and_an_address() -> None:
    found = checked(a={"gpus": {"count": 1}, "ssh_hostname": "192.0.2.1"}, b={})

    assert found["a"].values == {"gpus": {"count": 1}, "ssh_hostname": "192.0.2.1"}
    assert {key: origin.file for key, origin in found["a"].origins.items()} == {
        "gpus": "a.yml",
        "ssh_hostname": "a.yml",
    }
    assert [found[name].address for name in "ab"] == ["192.0.2.1", "b"]

"""Every file of the operator's that settings name is found from the project's root."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpufleet.paths import PROJECT
from gpufleet.settings.base import Setting
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.operator_paths import from_root
from tests.unit.settings.test_mistake_sentence import fields

WRITTEN: dict[str, Any] = {
    "vllm": {
        "version": "0.32.0",
        "lock": "locks/vllm.txt",
        "api_key_file": "secrets/key",
        "environment_files": {"S3_KEY": "secrets/s3"},
    },
    "serving": {"m": {"model": "/srv/m", "environment_files": {"TOKEN": "secrets/token"}}},
    "gateway": {
        "tls": {"certificate_file": "tls/gw.pem", "key_file": "tls/none.key"},
        "clients": [{"name": "a", "key_sha256": "0" * 64}],
    },
    "exporters": {
        "tls": {"certificate_file": "tls/{node}.pem", "key_file": "tls/{node}.key"},
        "basic_auth": {"password_file": "secrets/exporters"},
    },
    "monitoring": {"alertmanager": {"page": {"webhook_url_file": "secrets/hook"}}},
}
THERE = (
    "locks/vllm.txt",
    "secrets/key",
    "secrets/s3",
    "secrets/token",
    "secrets/exporters",
    "secrets/hook",
    "tls/gw.pem",
    "tls/gpu-01.pem",
)


def named(value: Any) -> Iterator[str]:
    """Yield every text in settings that looks like one of these files."""
    if isinstance(value, dict):
        for each in value.values():
            yield from named(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from named(each)
    elif isinstance(value, str) and value.rpartition("/")[0].endswith(("locks", "secrets", "tls")):
        yield value


def test_each_file_that_is_there_has_its_whole_path_and_others_stay(tmp_path: Path) -> None:
    for name in THERE:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    settings: Setting = NodeSettings.model_validate(WRITTEN)

    found = set(named(from_root(settings, tmp_path, "gpu-01").model_dump(mode="json")))

    there = {str(tmp_path / name) for name in THERE if name != "tls/gpu-01.pem"}
    assert found == {
        *there,
        f"{tmp_path}/tls/{{node}}.pem",
        "tls/none.key",
        "tls/{node}.key",
        str(PROJECT / "locks/uv.txt"),
    }


def test_a_lock_that_is_not_there_is_the_one_that_gpufleet_ships(tmp_path: Path) -> None:
    vllm = {"version": "0.32.0", "lock": "locks/vllm-0.32.0.txt", "api_key_file": "secrets/key"}
    settings = NodeSettings.model_validate({"vllm": vllm}).vllm
    assert settings

    found = from_root(settings, tmp_path, "gpu-01")
    other = from_root(settings.model_copy(update={"lock": "locks/none.txt"}), tmp_path, "gpu-01")
    (tmp_path / "locks").mkdir()
    (tmp_path / settings.lock).touch()
    own = from_root(settings, tmp_path, "gpu-01")

    assert found.lock == str(PROJECT / "locks/vllm-0.32.0.txt")
    assert found.api_key_file == "secrets/key"
    assert other.lock == "locks/none.txt"
    assert own.lock == str(tmp_path / settings.lock)


def test_every_key_of_a_file_is_called_so_that_it_is_found() -> None:
    """What is named otherwise would be read from the working directory."""
    on_this_machine = {
        at
        for at, _ in fields(NodeSettings)
        for name in [str(at[-1])]
        if "file" in name and not name.endswith(("_file", "_files"))
    }
    assert on_this_machine == {("gpu_lock", "toolkit", "profile")}

"""What `gpufleet validate` finds in an inventory without its nodes."""

from __future__ import annotations

import datetime as dt

import pytest

from gpufleet.errors import FleetError
from gpufleet.fleet.inventory_check import require_valid, validate
from gpufleet.inventory.loader import read
from tests.support.checkout import ROOT
from tests.support.fleet_folder import REVISION, FleetFolder
from tests.unit.monitoring.test_exporters import NOW, Authority, pem

LOCKS = {
    "lock": str(ROOT / "locks/vllm-0.32.0.txt"),
    "uv_lock": str(ROOT / "locks/uv.txt"),
}
QWEN = {"model": "Qwen/Qwen3-8B", "revision": REVISION}


@pytest.fixture
def fleet(tmp_path):
    """Two GPU nodes that serve a model, with a key of their own."""
    vllm = {"version": "0.32.0", **LOCKS, "api_key_file": "secrets/key"}
    found = FleetFolder(
        tmp_path,
        {"gpu": ["g-01", "g-02"]},
        {"all": {"vllm": vllm, "serving": {"qwen": QWEN}}},
        "Qwen/Qwen3-8B",
    )
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets/key").write_text("s3cret")
    (tmp_path / "secrets/key").chmod(0o600)
    return found


def serve(fleet, **changed):
    """Write `serving` with another entry."""
    vllm = {"version": "0.32.0", **LOCKS, "api_key_file": "secrets/key"}
    fleet.write("all", {"vllm": vllm, "serving": {"qwen": {**QWEN, **changed}}})


def found(fleet, **options):
    return validate(read(fleet.inventory), **options)


def test_an_inventory_that_is_right_has_no_problems(fleet):
    assert found(fleet).problems == ()
    assert require_valid(read(fleet.inventory)) == found(fleet).remarks


def test_a_secret_file_that_is_missing_or_empty_is_named_with_its_line_once(fleet):
    (fleet.folder / "secrets/key").write_text("\n")
    assert found(fleet).problems == (
        f"group_vars/all.yml:6: vllm.api_key_file: {fleet.folder}/secrets/key is empty",
    )

    (fleet.folder / "secrets/key").unlink()
    (said,) = found(fleet).problems
    assert said.startswith("group_vars/all.yml:6: vllm.api_key_file: secrets/key cannot be read")
    # A machine that runs checks of settings has no secrets.
    assert found(fleet, secret_files=False).problems == ()
    with pytest.raises(FleetError, match="cannot be read"):
        require_valid(read(fleet.inventory))


def test_a_key_that_no_header_can_have_is_a_problem_where_secrets_are_read(fleet):
    (fleet.folder / "secrets/key").write_text("one\ntwo\n")
    (said,) = found(fleet).problems
    assert "more than one line" in said
    assert found(fleet, secret_files=False).problems == ()


def test_a_secret_file_that_others_can_read_is_a_remark(fleet):
    (fleet.folder / "secrets/key").chmod(0o644)

    assert found(fleet).problems == ()
    assert any("has mode 0644" in remark for remark in found(fleet).remarks)


def test_a_lock_that_is_missing_is_a_problem_also_without_secrets(fleet):
    vllm = {"version": "0.32.0", **LOCKS, "lock": "locks/none.txt", "listen": "127.0.0.1"}
    fleet.write("all", {"vllm": vllm, "serving": {"qwen": QWEN}})

    (said,) = found(fleet, secret_files=False).problems
    assert "vllm.lock: locks/none.txt cannot be read" in said


def test_a_flag_that_the_release_does_not_know_is_refused_with_its_line(fleet):
    serve(fleet, flags={"swap-space": 4})

    (said,) = found(fleet).problems
    assert said.startswith("group_vars/all.yml:4: serving.qwen.flags.swap-space:")


def test_code_of_a_model_that_no_lock_names_is_refused(fleet):
    serve(fleet, flags={"trust-remote-code": True})

    (said,) = found(fleet).problems
    assert "`trust-remote-code` runs code of Qwen/Qwen3-8B" in said


def test_the_fleet_is_planned_where_its_hardware_is_named(fleet):
    models = {"models_folder": fleet.models}
    assert found(fleet).totals is None

    planned = found(fleet, hardware={"all": "h100x8"}, **models)
    assert planned.totals
    assert (planned.totals.gpus, planned.totals.planned) == (16, 1)

    serve(fleet, replicas=17)
    (said,) = found(fleet, hardware={"all": "h100x8"}, **models).problems
    assert "17 replicas of 1 GPU declared, of which 16 fit on g-01, g-02" in said


def test_hardware_that_every_gpu_node_declares_is_planned_on(fleet):
    fleet.write("gpu", {"gpus": {"hardware": "a100x8"}})

    planned = found(fleet, models_folder=fleet.models)

    assert planned.totals
    assert planned.totals.gpus == 16


def test_files_of_nodes_that_a_run_leaves_alone_do_not_stop_it(fleet):
    (fleet.folder / "host_vars").mkdir()
    (fleet.folder / "host_vars/g-02.yml").write_text(
        "exporters: {tls: {certificate_file: c, key_file: k}}"
    )

    assert require_valid(read(fleet.inventory), only={"g-01"}) is not None
    with pytest.raises(FleetError, match=r"exporters.tls.certificate_file: c cannot be read"):
        require_valid(read(fleet.inventory), only={"g-02"})


def test_a_certificate_that_has_expired_is_refused(fleet):
    certificate, key = Authority().sign("g-01", since=NOW - dt.timedelta(days=20), days=5)
    (fleet.folder / "secrets/tls.pem").write_bytes(pem(certificate))
    (fleet.folder / "secrets/tls.key").write_bytes(pem(key))
    tls = {"certificate_file": "secrets/tls.pem", "key_file": "secrets/tls.key"}
    fleet.write("gpu", {"exporters": {"tls": tls}})

    assert any("has expired" in said for said in found(fleet).problems)

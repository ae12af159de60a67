"""Secrets in values that commands print as JSON, and keys in lines of logs."""

import json
import re

from gpufleet.on_node.common import linux_facts, unit_journal
from gpufleet.redact import hide_in_value, hide_secrets, is_secret_name
from tests.support.checkout import ROOT
from tests.support.rows import each_row

KEY, ADMIN = "lab-key-0123456789", "admin-0123456789"
ARGUMENTS = {"api_key": KEY, "admin_api_key": ADMIN, "api_key_file": "/k", "port": 31000}


def test_no_text_of_a_value_has_a_secret_at_any_depth() -> None:
    value = {
        "evidence": [{"text": "vllm serve m --api-key s3cret-word", "at": 5}],
        "do": ("curl -H 'Authorization: Bearer hf_" + "a" * 34 + "'",),
        "none": None,
        "serves": True,
    }

    shown = hide_in_value(value, ["s3cret-word"])

    assert shown == {
        "evidence": [{"text": "vllm serve m --api-key (not shown)", "at": 5}],
        "do": ["curl -H '(not shown)'"],
        "none": None,
        "serves": True,
    }


@each_row(
    "line",
    [
        f"[2026-11-29 11:18:26] server_args={ARGUMENTS}",
        f"server_args=ServerArgs(port=1, api_key={KEY!r}, admin_api_key={ADMIN!r}, tp_size=1)",
        json.dumps(ARGUMENTS),
        json.dumps({"MESSAGE": json.dumps(ARGUMENTS)}),
        json.dumps({"MESSAGE": f"server_args={ARGUMENTS}"}),
        f"server_args={ARGUMENTS}".partition("0123")[0],
        f"sglang serve: error: unrecognized arguments: --api_key {KEY} --admin_api_key={ADMIN}",
        f"server_args={{'ssl_keyfile_password': {KEY!r}}}",
        "server_args=" + repr({"api_key": f'it\'s "{KEY}" \\ {ADMIN}'}),
    ],
)
def test_keys_are_hidden_by_their_names_on_the_node_and_on_the_controller(line: str) -> None:
    for shown in (hide_secrets(line, ()), unit_journal.secret_redactor({})(line)):
        assert "lab-key" not in shown
        assert "0123" not in shown
        assert shown.startswith(line[:10])


def test_no_key_of_a_recorded_start_of_sglang_is_shown() -> None:
    text = (ROOT / "tests/data/failures/healthy/sglang-0.5.23-cpu.log").read_text("utf-8")
    assert {"lab-key", "lab-admin"} <= set(re.findall(r"lab-key|lab-admin", text))
    for shown in (hide_secrets(text, ()), unit_journal.secret_redactor({})(text)):
        assert not re.findall(r"lab-key|lab-admin", shown)
        assert len(shown) > len(text) - 100


@each_row(
    "line",
    [
        "server_args={'api_key': None, 'port': 31000, 'tokenizer_mode': 'auto'}",
        "ValueError: --grpc-port is incompatible with --api-key/--admin-api-key: the native gRPC",
        "argument --api-key: expected one argument",
        "api_key_file='/etc/keys/a', key='b'",
    ],
)
def test_lines_that_only_name_a_key_stay(line: str) -> None:
    assert hide_secrets(line, ()) == line
    assert unit_journal.secret_redactor({})(line) == line


def test_what_follows_a_key_stays() -> None:
    line = f"server_args={ARGUMENTS}"
    assert hide_secrets(line, ()).endswith("'api_key_file': '/k', 'port': 31000}")
    assert hide_secrets("api_key='cut\nthe next line 'x'", ()).endswith("\nthe next line 'x'")


def test_keys_in_a_config_file_that_is_a_credential_are_secrets(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(linux_facts, "ROOT", str(tmp_path))
    (tmp_path / "keys.yaml").write_text(f"api-key: {KEY}\nadmin-api-key: 'admin-0123456789'\n")
    known = unit_journal.secrets(
        "LoadCredential=keys.yaml:/keys.yaml\n"
        "ExecStart=sglang serve --admin-api-key of-the-unit-1 --port 1\n"
    )
    assert known["of-the-unit-1"] == "admin-api-key"
    assert unit_journal.secret_redactor(known)(f"x {KEY} admin-0123456789") == (
        "x <api-key> <admin-api-key>"
    )


def test_flags_of_sglang_that_sound_like_secrets_are_none() -> None:
    names = ("speculative-token-map", "forward-pass-metrics-ipc-name")

    assert [name for name in names if is_secret_name(name)] == []
    assert is_secret_name("forward-token")
    assert is_secret_name("db-pass")

"""A secret in the open is refused at its place, with what to write; what only looks so is not."""

from __future__ import annotations

from typing import Any

import pytest

from gpufleet.flags import schema
from gpufleet.redact import is_secret_name
from gpufleet.settings.open_secrets import open_secrets
from gpufleet.settings.parse import SettingsError, parse_settings
from gpufleet.settings.serving_settings import PLANNED_ENVIRONMENT
from tests.support.rows import each_row

PLAIN = "canary7391"
VLLM: dict[str, Any] = {"version": "0.32.0", "lock": "a.txt", "listen": "127.0.0.1"}
MODEL: dict[str, Any] = {"model": "/srv/m"}


def settings(*, vllm: dict[str, Any] | None = None, **model: Any) -> dict[str, Any]:
    return {"vllm": VLLM | (vllm or {}), "serving": {"m": MODEL | model}}


def refused(data: dict[str, Any]) -> dict[str, str]:
    with pytest.raises(SettingsError) as error:
        parse_settings(data)
    return {".".join(map(str, at)): what for at, what in error.value.mistakes}


ROWS: list[tuple[dict[str, Any], str, str]] = [
    (
        settings(environment={"AWS_SECRET_ACCESS_KEY": PLAIN}),
        "serving.m.environment.AWS_SECRET_ACCESS_KEY",
        "{AWS_SECRET_ACCESS_KEY: secrets/aws-secret-access-key}",
    ),
    (
        settings(vllm={"environment": {"PROXY_PASSWORD": PLAIN}}),
        "vllm.environment.PROXY_PASSWORD",
        "`environment_files`",
    ),
    (
        settings(environment={"WHATEVER": f"sk-{PLAIN}"}),
        "serving.m.environment.WHATEVER",
        "`environment_files`",
    ),
    (
        settings(environment={"HTTPS_PROXY": f"http://user:{PLAIN}@proxy:3128"}),
        "serving.m.environment.HTTPS_PROXY",
        "address",
    ),
    (
        settings(vllm={"index_url": f"https://user:{PLAIN}@index.example/simple"}),
        "vllm.index_url",
        "/root/.netrc",
    ),
    (
        settings(vllm={"index_url": f"https://{PLAIN}@index.example/simple"}),
        "vllm.index_url",
        "/root/.netrc",
    ),
    (
        settings(vllm={"find_links": [f"https://u:{PLAIN}@wheels.example/"]}),
        "vllm.find_links.0",
        "/root/.netrc",
    ),
    (
        settings(vllm={"hf_endpoint": f"https://u:{PLAIN}@hub.example"}),
        "vllm.hf_endpoint",
        "`hf_token_file`",
    ),
    (
        settings(flags={"additional-config": {"remote": {"password": PLAIN}}}),
        "serving.m.flags.additional-config.remote.password",
        "all users of the node can read arguments",
    ),
    (
        settings(flags={"additional-config": f'{{"api_key": "{PLAIN}"}}'}),
        "serving.m.flags.additional-config",
        "all users of the node can read arguments",
    ),
    (
        settings(vllm={"api_key_file": f"sk-{PLAIN}"}),
        "vllm.api_key_file",
        "a file that git does not track",
    ),
    (
        settings(vllm={"api_key_file": f"-----BEGIN PRIVATE KEY-----\n{PLAIN}"}),
        "vllm.api_key_file",
        "a file that git does not track",
    ),
    (
        settings(vllm={"version": ["sk-" + PLAIN]}),  # whose own mistake would quote it
        "vllm.version.0",
        "a file that git does not track",
    ),
]


@each_row(("data", "key", "said"), ROWS, ids=[f"{row[1]}-{n}" for n, row in enumerate(ROWS)])
def test_a_secret_is_refused_by_its_key_and_never_quoted(
    data: dict[str, Any], key: str, said: str
) -> None:
    found = refused(data)
    assert said in found[key]
    assert PLAIN not in str(found)


def test_a_password_in_an_address_is_found_also_where_no_setting_has_the_name() -> None:
    """The token of the Hub is spoken of where the Hub's address is."""
    proxy, hub = open_secrets(
        {
            "proxy": f"http://user:{PLAIN}@proxy:3128",
            "vllm": {"hf_endpoint": f"https://u:{PLAIN}@hub.example"},
        }
    )
    assert (proxy.at, hub.at) == (("proxy",), ("vllm", "hf_endpoint"))
    assert "/root/.netrc" in proxy.sentence
    assert ("hf_token_file" in proxy.sentence, "hf_token_file" in hub.sentence) == (False, True)


def test_what_only_looks_like_a_secret_is_taken() -> None:
    """Names of files, of tokens that a model reads, and plain addresses."""
    taken = settings(
        vllm={"index_url": "https://index.example/simple", "api_key_file": "secrets/api-key"},
        environment={"TOKENIZERS_PARALLELISM": "false", "SSL_CERT_FILE": "/etc/ca.pem"},
        flags={"max-num-batched-tokens": 8192, "additional-config": {"eos_token": "</s>"}},
    )
    assert list(open_secrets(taken)) == []
    parse_settings(taken)


def test_no_variable_of_vllm_is_refused_for_its_name_that_is_no_secret() -> None:
    """A new release's variable that is would have no place: it is added here, or to `redact`."""
    names = {name for version in schema.versions() for name in schema.load(version).environment}
    found = {name for name in names if is_secret_name(name)} - PLANNED_ENVIRONMENT
    assert found == {"S3_ACCESS_KEY_ID", "S3_SECRET_ACCESS_KEY"}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            {"environment_files": {"HF_TOKEN": "secrets/t"}},
            "but gpufleet sets this from the plan: remove",
        ),
        ({"environment_files": {"no-name": "secrets/t"}}, "the name of a variable:"),
        ({"environment": {"A": "1"}, "environment_files": {"A": "secrets/t"}}, "both set A"),
    ],
)
def test_a_file_of_a_variable_is_refused_as_a_variable_is(more: dict[str, Any], said: str) -> None:
    assert said in str(refused(settings(**more)))
    assert said in str(refused(settings(vllm=more)))

"""A model's files: where they lie, and how they are downloaded."""

from __future__ import annotations

from gpufleet.artifacts.model_files import (
    Checkpoint,
    adapter_copies,
    adapter_directory,
    checkpoint,
    checkpoints,
    download_script,
    listing_url,
)
from gpufleet.settings.serving_settings import Served, Vllm

REVISION = "0123456789abcdef0123456789abcdef01234567"


def vllm(**more: object) -> Vllm:
    given: dict[str, object] = {"version": "0.32.0", "lock": "a.txt", "listen": "127.0.0.1", **more}
    return Vllm.model_validate(given)


def test_a_model_of_the_hub_lies_under_its_name_and_revision() -> None:
    found = checkpoint(Served.model_validate({"model": "org/name", "revision": REVISION}))

    assert found is not None
    assert found.directory == f"/var/lib/vllm/models/org--name/{REVISION}"
    assert found.mark == f"{found.directory}/.complete"


def test_a_model_at_a_path_is_not_downloaded() -> None:
    assert checkpoint(Served.model_validate({"model": "/srv/model"})) is None


def test_adapters_of_the_hub_are_downloaded_as_models_are() -> None:
    sql = {"source": "org/sql", "revision": REVISION[::-1]}
    adapters = {"sql": sql, "bare": {"source": "/srv/bare"}}
    for model in ({"model": "org/name", "revision": REVISION}, {"model": "/srv/model"}):
        served = Served.model_validate({**model, "adapters": adapters})

        *found, adapter = checkpoints(served)

        own = checkpoint(served)
        assert found == ([own] if own else [])
        assert adapter.repository == "org/sql"
        assert adapter.directory == f"/var/lib/vllm/models/org--sql/{REVISION[::-1]}"
        assert adapter.directory == adapter_directory(served.adapters["sql"])


def test_only_a_pinned_adapter_at_a_path_is_copied_and_its_place_has_its_hash() -> None:
    adapters = {
        "bare": {"source": "/srv/bare"},
        "pinned": {"source": "/srv/pinned", "sha256": "ab" * 32},
    }
    served = Served.model_validate({"model": "/srv/model", "adapters": adapters})

    (copied,) = adapter_copies(served)

    assert checkpoints(served) == ()
    assert (copied.source, copied.sha256) == ("/srv/pinned", "ab" * 32)
    assert copied.directory == f"/var/lib/vllm/models/adapters/{'ab' * 32}"
    assert copied.directory == adapter_directory(served.adapters["pinned"])
    assert adapter_directory(served.adapters["bare"]) == "/srv/bare"


def test_the_list_of_files_is_asked_of_the_endpoint_that_is_set() -> None:
    wanted = Checkpoint("org/name", REVISION, "/m")

    path = f"api/models/org/name/tree/{REVISION}?recursive=true"
    assert listing_url(wanted, vllm()) == f"https://huggingface.co/{path}"
    mirror = vllm(hf_endpoint="https://mirror.example/hf/")
    assert listing_url(wanted, mirror) == f"https://mirror.example/hf/{path}"


def test_a_download_may_take_six_hours_and_gets_its_token_as_a_credential() -> None:
    wanted = Checkpoint("org/name", REVISION, "/m")

    plain = download_script(wanted, vllm(), "/r")
    secret = download_script(wanted, vllm(hf_token_file="secrets/hf-token"), "/r")

    assert f"-p RuntimeMaxSec={6 * 60 * 60} " in plain
    assert "hf-token" not in plain
    assert "-p LoadCredential=hf-token:/etc/vllm/credentials/hf-token " in secret
    assert "export HF_TOKEN_PATH=" in secret

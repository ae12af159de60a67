"""Entries name their engine; what engines of a node share is said once."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from gpufleet.engines.engine import engines
from gpufleet.settings import engine_flags
from gpufleet.settings.parse import SettingsError, parse_settings, with_key

VLLM = {"version": "0.32.0", "lock": "vllm.txt", "listen": "127.0.0.1", "user": "llm"}
SGLANG = {"version": "0.5.23", "lock": "sglang.txt"}
ENTRY = {"model": "/srv/tiny", "tensor_parallel": 1}


def problems(**given: Any) -> list[str]:
    with pytest.raises(SettingsError) as refused:
        parse_settings(given)
    return [with_key(*each) for each in refused.value.mistakes]


def entry(**changes: Any) -> dict[str, Any]:
    return {"tiny": {**ENTRY, "engine": "sglang", **changes}}


def test_settings_know_each_engine_by_the_name_that_it_has() -> None:
    """Settings cannot ask the engines: these import settings."""
    names = [each.name for each in engines()]
    assert sorted(engine_flags.NAMES) == sorted(get_args(engine_flags.EngineName)) == names
    assert [engine_flags.of(each.name).title for each in engines()] == [  # type: ignore[arg-type]
        each.title for each in engines()
    ]
    sections = parse_settings({name: {**SGLANG, **VLLM} for name in names}).engines
    assert sorted(sections) == names
    assert [each.engine for each in sections.values()] == [*sections]


def test_a_section_beside_vllm_has_its_values_but_for_release_and_variables() -> None:
    vllm = {**VLLM, "environment": {"A": "1"}, "no_index": True, "find_links": ["/w"]}
    found = parse_settings({"vllm": vllm, "sglang": SGLANG, "serving": entry()})

    assert found.sglang
    assert (found.sglang.version, found.sglang.lock) == ("0.5.23", "sglang.txt")
    assert found.sglang.environment == {}
    assert (found.sglang.user, found.sglang.listen) == ("llm", "127.0.0.1")
    assert (found.sglang.no_index, found.sglang.find_links) == (True, ("/w",))
    assert found.servers is found.vllm
    assert found.engine_of("tiny") is found.sglang
    assert found.used_engines == (found.sglang,)


def test_a_fleet_of_one_engine_needs_no_section_of_another() -> None:
    found = parse_settings({"sglang": {**SGLANG, "listen": "127.0.0.1"}, "serving": entry()})

    assert found.vllm is None
    assert found.servers is found.sglang


@pytest.mark.parametrize("key", ["user", "listen", "api_key_file", "watchdog_port"])
def test_servers_of_a_node_cannot_differ_in_what_they_share(key: str) -> None:
    value = {"user": "other", "listen": "127.0.0.2", "api_key_file": "key", "watchdog_port": 9000}
    (said,) = problems(
        vllm={**VLLM, "allow_unauthenticated": True},
        sglang={**SGLANG, key: value[key]},
        serving=entry(),
    )
    assert said.startswith(f"`sglang.{key}` differs from `vllm.{key}`")


def test_an_engine_without_a_release_is_named() -> None:
    (said,) = problems(vllm=VLLM, serving=entry())
    assert said == (
        "`serving` has entries with `engine: sglang`, but `sglang` is not set: set the "
        "release of the engine under `sglang`"
    )


def test_a_mistake_in_a_shared_key_is_said_once() -> None:
    (said,) = problems(vllm={**VLLM, "watchdog_port": 80}, sglang=SGLANG, serving=entry())
    assert said.startswith("vllm.watchdog_port")


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"kind": "embed"}, "kind"),
        ({"presets": ["throughput"]}, "presets"),
        ({"gpu_share": 0.5}, "gpu_share"),
        ({"data_parallel": 2}, "data_parallel"),
        ({"expert_parallel": True}, "expert_parallel"),
        ({"distributed_executor_backend": "ray"}, "distributed_executor_backend"),
        ({"prefill": "other"}, "prefill"),
        ({"adapters": {"sql": {"source": "/srv/sql"}}}, "adapters"),
    ],
)
def test_what_gpufleet_has_for_vllm_alone_is_refused(changes: dict[str, Any], key: str) -> None:
    (said,) = problems(sglang={**SGLANG, "listen": "127.0.0.1"}, serving=entry(**changes))
    assert said.startswith(f"serving.tiny: `{key}` is not supported with `engine: sglang`")


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("tp-size", "but gpufleet sets this from the plan"),
        ("api-key", "but gpufleet sets this from the plan"),
        ("enable-metrics", "but gpufleet sets this from the plan"),
        ("config", "could override the plan"),
        ("grpc-port", "does not check the API key"),
        ("grpc-mode", "instead of the HTTP server"),
        ("smg-grpc-mode", "instead of the HTTP server"),
        ("encoder-only", "flag does not complete text"),
        ("is-embedding", "flag does not complete text"),
        ("disaggregation-mode", "flag does not complete text"),
        ("tokenizer-worker-num", "does not check the API key"),
        ("use-ray", "gpufleet starts the ranks itself"),
        ("base-gpu-id", "but gpufleet sets this from the plan"),
        ("gpu-id-step", "but gpufleet sets this from the plan"),
        ("gated-launch-port", "would never be ready"),
        ("checkpoint-engine-wait-weights-before-ready", "would never be ready"),
        ("debug-tensor-dump-input-file", "exits as soon as it is ready"),
        ("delete-ckpt-after-loading", "restarts and other replicas"),
        ("context_length", "as in `sglang serve --help`"),
    ],
)
def test_flags_are_judged_by_their_engine(flag: str, says: str) -> None:
    (said,) = problems(sglang={**SGLANG, "listen": "127.0.0.1"}, serving=entry(flags={flag: 1}))
    assert says in said


VARIABLES = {
    "BLOCK_NONZERO_RANK_CHILDREN": "the ranks on other nodes would exit as soon as they are ready",
    "DIAG_BYPASS_HEALTH_GENERATE": "`/health` would answer 200 without testing the engine",
    "ENABLE_HEALTH_ENDPOINT_GENERATION": "`/health` would answer 200 without testing the engine",
    "FORCE_SHUTDOWN": "each stop would cut off running requests",
    "GRPC_PORT": "it opens a port on which the server does not check the API key",
    "LOGGING_CONFIG_PATH": "SGLang logs its keys, so these log files could contain them",
    "RUST_SERVER": "it opens a port on which the server does not check the API key",
}


@pytest.mark.parametrize("key", ["environment", "environment_files"])
@pytest.mark.parametrize("prefix", ["SGLANG_", "SGL_"])
@pytest.mark.parametrize(("name", "says"), VARIABLES.items())
def test_variables_that_break_what_gpufleet_promises_are_refused(
    name: str, says: str, prefix: str, key: str
) -> None:
    """For all servers of the engine, and for those of an entry; another engine may have them."""
    given = {key: {prefix + name: "1"}}
    section = {**SGLANG, "listen": "127.0.0.1"}
    (all_servers,) = problems(sglang={**section, **given}, serving=entry())
    (one_entry,) = problems(sglang=section, serving=entry(**given))
    assert all_servers == f"sglang.{key}.{prefix}{name}: {says}: remove this variable"
    assert one_entry == f"serving.tiny.{key}.{prefix}{name}: {says}: remove this variable"
    assert parse_settings({"vllm": {**VLLM, **given}}).vllm


def test_the_context_and_its_flag_are_the_engines() -> None:
    (said,) = problems(
        sglang={**SGLANG, "listen": "127.0.0.1"},
        serving=entry(context=512, flags={"context-length": 512}),
    )
    assert "`context` and `flags.context-length` set the same value" in said


def test_a_release_that_cannot_be_started_is_refused() -> None:
    (said,) = problems(
        sglang={**SGLANG, "version": "0.5.1", "listen": "127.0.0.1"}, serving=entry()
    )
    assert "SGLang 0.5.1 has no command `sglang serve`: use 0.5.5 or newer" in said

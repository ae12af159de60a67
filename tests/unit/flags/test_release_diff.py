"""An upgrade of vLLM is told as what it does to one's own flags: nothing left out, nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpufleet.cli.flags_command import flags
from gpufleet.errors import FleetError
from gpufleet.flags import changes, command_line, schema
from gpufleet.flags.from_settings import ServerFlags, from_file
from gpufleet.flags.pages import diff_page
from gpufleet.flags.release_diff import (
    Difference,
    DifferenceKind,
    diff,
    overview,
    recommended_flags,
    rewrite_command_line,
)
from tests.support.rows import each_row

VERSIONS = schema.versions()
NEWEST = VERSIONS[-1]


def _diff(old: str, new: str, *argv: str, **environment: str) -> tuple[Difference, ...]:
    yours = ServerFlags(("MODEL", *argv), environment)
    return diff(schema.load(old), schema.load(new), yours)


def _broken(old: str, new: str, *argv: str, **environment: str) -> dict[str, Difference]:
    return {one.name: one for one in _diff(old, new, *argv, **environment) if one.breaks}


def _one(found: tuple[Difference, ...], sort: DifferenceKind, name: str) -> Difference:
    (one,) = [each for each in found if (each.kind, each.name) == (sort, name)]
    return one


@each_row("version", VERSIONS)
def test_nothing_changes_from_a_release_to_itself(version: str) -> None:
    argv = ("--max-model-len", "4096", "--swap-space", "4", "--enable-lora")
    known = [word for word in argv if not word.startswith("--") or schema.load(version).flag(word)]
    if schema.load(version).flag("--swap-space") is None:
        known.remove("4")
    assert _diff(version, version, *known) == ()


# Every flag that a guide recommends and a later release refuses, as one upgrade meets it.
@each_row(
    ("old", "new", "argv", "sort", "since"),
    [
        ("0.17.0", "0.18.0", ("--swap-space", "4"), DifferenceKind.REMOVED, "0.18.0"),
        ("0.12.0", "0.13.0", ("--task", "generate"), DifferenceKind.RENAMED, "0.13.0"),
        ("0.6.6", "0.7.0", ("--worker-use-ray",), DifferenceKind.RENAMED, "0.7.0"),
        ("0.11.0", NEWEST, ("--guided-decoding-backend", "auto"), DifferenceKind.RENAMED, "0.12.0"),
        ("0.27.0", "0.28.0", ("--calculate-kv-scales",), DifferenceKind.REMOVED, "0.28.0"),
        ("0.27.0", "0.28.0", ("--no-calculate-kv-scales",), DifferenceKind.REMOVED, "0.28.0"),
        ("0.16.0", "0.32.0", ("--disable-log-requests",), DifferenceKind.REMOVED, "0.17.0"),
    ],
)
def test_a_flag_that_is_gone_breaks_and_is_put_right(
    old: str, new: str, *, argv: tuple[str, ...], sort: DifferenceKind, since: str
) -> None:
    yours = ServerFlags(("MODEL", *argv))
    found = diff(schema.load(old), schema.load(new), yours)
    one = _one(found, sort, argv[0])
    assert one.breaks
    assert one.argument == " ".join(argv)
    assert one.since == since
    if sort is DifferenceKind.REMOVED:
        assert one.rewritten == ()
    whole = rewrite_command_line(yours, found, schema.load(new))
    assert whole
    assert not command_line.parse(schema.load(new), whole).unparsed


def test_a_flag_that_came_back_does_not_break() -> None:
    assert not _broken("0.16.0", "0.33.0", "--disable-log-requests")


def test_what_both_releases_refuse_is_told_all_the_same() -> None:
    one = _broken("0.20.2", "0.33.0", "--num-scheduler-steps", "8")["--num-scheduler-steps"]
    assert "0.20.2 also refuses this flag" in one.said
    assert one.rewritten == ()


def test_a_flag_that_only_the_new_release_has_does_not_break() -> None:
    assert not _broken("0.20.2", "0.33.0", "--device-ids", "0,1")


def test_a_downgrade_breaks_what_the_older_release_lacks() -> None:
    one = _broken("0.33.0", "0.20.2", "--device-ids", "0,1")["--device-ids"]
    assert one.kind is DifferenceKind.REMOVED
    assert one.since is None
    assert one.rewritten is None


@each_row(
    ("old", "new", "argv", "since"),
    [
        ("0.24.0", "0.28.0", ("--quantization", "bitsandbytes"), "0.28.0"),
        ("0.23.0", "0.24.0", ("--load-format", "gguf"), "0.24.0"),
        ("0.10.1", "0.10.2", ("--prefix-caching-hash-algo", "builtin"), "0.10.2"),
        ("0.30.0", "0.31.0", ("--tokenizer-mode", "slow"), "0.31.0"),
        ("0.23.0", "0.24.0", ("--tool-call-parser", "minimax"), "0.24.0"),
        # The table of changes says nothing of this one: the lists of both releases do.
        ("0.20.2", "0.21.0", ("--attention-backend", "TREE_ATTN"), "0.21.0"),
    ],
)
def test_a_value_that_is_no_longer_accepted_breaks(
    old: str, new: str, argv: tuple[str, ...], since: str
) -> None:
    one = _broken(old, new, *argv)[argv[0]]
    assert (one.kind, one.since) == (DifferenceKind.VALUE, since)
    assert not _broken(old, old, *argv)


def test_whatever_else_the_check_of_the_new_release_refuses_breaks() -> None:
    """Types, numbers and combinations: the table of changes has no word on them."""
    one = _broken("0.9.2", "0.12.0", "--enable-lora", "--max-lora-rank", "4")["--max-lora-rank"]
    assert one.kind is DifferenceKind.VALUE
    assert "not an accepted value" in one.said
    assert not _broken("0.12.0", "0.13.0", "--enable-lora", "--max-lora-rank", "4")


def test_a_json_key_that_is_gone_breaks() -> None:
    argv = ("--speculative-config", '{"method": "ngram", "disable_by_batch_size": 4}')
    one = _broken("0.16.0", "0.17.0", *argv)["--speculative-config"]
    assert "disable_by_batch_size" in one.said
    assert not _broken("0.16.0", "0.17.0", "--speculative-config", '{"method": "ngram"}')


def test_a_new_meaning_touches_only_its_value() -> None:
    one = _broken("0.30.0", "0.31.0", "--quantization", "fp8")["--quantization"]
    assert one.kind is DifferenceKind.MEANING
    assert one.when
    assert one.rewritten == ("--quantization", "fp8_per_tensor")
    assert not _broken("0.30.0", "0.31.0", "--quantization", "awq")
    assert not _broken("0.31.0", "0.32.0", "--quantization", "fp8")


def test_compilation_as_json_behind_the_short_option_moves_and_a_level_stays() -> None:
    moved = _broken("0.11.0", "0.12.0", "-O", '{"use_inductor": true}')["-O"]
    assert moved.rewritten == ("-cc", '{"use_inductor": true}')
    assert not _broken("0.11.0", "0.12.0", "-O", "3")


def test_the_old_form_of_a_value_is_written_anew_and_the_new_form_left_alone() -> None:
    one = _broken("0.8.3", "0.8.5", "--limit-mm-per-prompt", "image=4")["--limit-mm-per-prompt"]
    assert one.rewritten == ("--limit-mm-per-prompt", '{"image": 4}')
    assert not _broken("0.8.3", "0.8.5", "--limit-mm-per-prompt", '{"image": 4}')


def test_a_beginning_of_a_name_breaks_once_it_is_that_of_several() -> None:
    """argparse takes it for the one flag that starts so, until there are two of them."""
    prefix = "--long-prefill"
    before = [one for one in schema.load("0.30.0").by_option if one.startswith(prefix)]
    assert before == ["--long-prefill-token-threshold"]
    assert not _broken("0.29.0", "0.30.0", prefix, "512")
    one = _broken("0.30.0", "0.31.0", prefix, "512")[prefix]
    assert "several flags" in one.said
    assert one.rewritten is None


def test_a_variable_that_is_gone_breaks_because_it_is_silently_ignored() -> None:
    broken = _broken("0.14.0", "0.16.0", VLLM_ATTENTION_BACKEND="FLASHINFER", NCCL_DEBUG="INFO")
    assert set(broken) == {"VLLM_ATTENTION_BACKEND"}
    one = broken["VLLM_ATTENTION_BACKEND"]
    assert "ignores" in one.said
    assert one.rewritten == ("--attention-backend", "FLASHINFER")
    assert one.argument == "VLLM_ATTENTION_BACKEND=FLASHINFER"


def test_a_variable_of_which_nothing_is_known_but_that_it_is_gone_breaks() -> None:
    assert not changes.changes_of("VLLM_TEST_STANDALONE_COMPILE")
    broken = _broken("0.9.0", "0.12.0", VLLM_TEST_STANDALONE_COMPILE="1")
    assert broken["VLLM_TEST_STANDALONE_COMPILE"].since == "0.9.1"


def test_what_replaces_a_variable_is_added_to_the_command_line() -> None:
    yours = ServerFlags(("MODEL", "--seed", "1"), {"VLLM_ATTENTION_BACKEND": "FLASHINFER"})
    found = diff(schema.load("0.14.0"), schema.load("0.16.0"), yours)
    whole = ("MODEL", "--seed", "1", "--attention-backend", "FLASHINFER")
    assert rewrite_command_line(yours, found, schema.load("0.16.0")) == whole


def test_what_breaks_comes_first() -> None:
    found = _diff("0.17.0", "0.20.2", "--disable-cascade-attn", "--swap-space", "4")
    breaks = [one.breaks for one in found]
    assert breaks[0]
    assert breaks == sorted(breaks, reverse=True)


def test_variables_of_others_are_not_judged() -> None:
    assert not _broken("0.14.0", "0.33.0", HTTP_PROXY="http://proxy", OMP_NUM_THREADS="8")


# -- defaults


def _defaults(found: tuple[Difference, ...]) -> set[str]:
    return {one.name for one in found if one.kind is DifferenceKind.DEFAULT}


def test_a_default_that_matters_is_told_to_who_does_not_set_it() -> None:
    one = _one(_diff("0.19.0", "0.20.0"), DifferenceKind.DEFAULT, "--gpu-memory-utilization")
    assert not one.breaks
    assert "0.9 → 0.92" in one.said
    assert one.keep == ("--gpu-memory-utilization", "0.9")
    set_ = _diff("0.19.0", "0.20.0", "--gpu-memory-utilization", "0.9")
    assert "--gpu-memory-utilization" not in _defaults(set_)


def test_a_default_that_changed_on_the_way_has_the_first_release_with_it() -> None:
    beside = _diff("0.8.1", "0.9.2", "--enable-lora-bias")
    assert _one(beside, DifferenceKind.DEFAULT, "--enable-lora").since == "0.8.5"


def test_a_default_beside_what_is_set_is_told_and_others_are_not() -> None:
    assert "--dcp-comm-backend" not in _defaults(_diff("0.28.0", "0.29.0"))
    beside = _diff("0.28.0", "0.29.0", "--decode-context-parallel-size", "2")
    assert "--dcp-comm-backend" in _defaults(beside)


def test_a_default_that_went_there_and_back_is_no_change() -> None:
    assert "--seed" in _defaults(_diff("0.7.3", "0.8.0"))
    assert "--seed" not in _defaults(_diff("0.7.3", "0.12.0"))


def test_nothing_empty_is_told_as_a_new_default() -> None:
    """null, {} and "" are one setting: `vLLM decides`."""
    assert schema.load("0.8.5").by_option["--override-generation-config"].default is None
    assert schema.load("0.9.0").by_option["--override-generation-config"].default == {}
    assert not _defaults(_diff("0.8.5", "0.9.0", "--generation-config", "auto"))


def test_a_default_in_other_letters_is_no_change() -> None:
    assert schema.load("0.8.5").by_option["--config-format"].default == "AUTO"
    assert "--config-format" not in _defaults(_diff("0.8.5", "0.9.0", "--load-format", "auto"))


def test_a_default_near_what_is_set_is_told_though_nothing_is_known_of_it() -> None:
    """What is near is what the explanations call related."""
    found = _diff("0.9.2", "0.10.0", "--cuda-graph-sizes", "64", VLLM_CPU_OMP_THREADS_BIND="all")
    assert "VLLM_CPU_KVCACHE_SPACE" in _defaults(found)
    assert "VLLM_CPU_KVCACHE_SPACE" not in _defaults(_diff("0.9.2", "0.10.0"))


def test_every_told_default_can_be_kept_by_an_argument_of_the_new_release() -> None:
    for old, new in (("0.12.0", "0.20.2"), ("0.20.2", NEWEST), ("0.8.5", "0.12.0")):
        for one in _diff(old, new, "--tensor-parallel-size", "2"):
            if one.keep and one.keep[0].startswith("-"):
                assert not command_line.parse(schema.load(new), ("MODEL", *one.keep)).unparsed


# -- new, hidden, deprecated


def test_a_useful_new_flag_is_told_to_whom_it_concerns() -> None:
    names = {one.name for one in _diff("0.28.0", "0.29.0") if one.kind is DifferenceKind.NEW}
    assert names == {"--max-num-queued-reqs"}
    found = _diff("0.28.0", "0.29.0", "--speculative-config", "{}")
    one = _one(found, DifferenceKind.NEW, "--per-request-spec-decode-metrics")
    assert one.since == "0.29.0"
    assert "you set --speculative-config" in one.said


def test_a_flag_that_is_written_before_its_release_is_not_told_as_new() -> None:
    found = _diff("0.28.0", "0.29.0", "--max-num-queued-reqs=64")
    assert not [one for one in found if one.kind is DifferenceKind.NEW]


def test_what_is_recommended_exists_and_was_not_always_there() -> None:
    releases = [schema.load(version) for version in VERSIONS]
    for one in recommended_flags():
        assert releases[-1].flag(one.name), one.name
        assert not releases[VERSIONS.index("0.8.5")].flag(one.name), one.name
        for other in one.beside:
            there = any(r.flag(other) or other in r.environment for r in releases)
            assert there or other == "VLLM_*", other


def test_hidden_and_deprecated_do_not_break_and_are_told_once() -> None:
    argv = ("--no-enable-prefix-caching", "--mamba-cache-mode", "none")
    assert _diff("0.33.0", "0.33.0", *argv) == ()
    found = _diff("0.32.0", "0.33.0", *argv)
    assert not any(one.breaks for one in found)
    assert _one(found, DifferenceKind.HIDDEN, "--no-enable-prefix-caching")
    assert _one(found, DifferenceKind.DEPRECATED, "--mamba-cache-mode").rewritten == ()


# -- without settings


def test_the_overview_counts_what_the_schemas_have() -> None:
    old, new = schema.load("0.17.0"), schema.load("0.18.0")
    counts = overview(old, new).counts
    lost = {f.name for f in old.flags if not f.positional} - set(new.by_option)
    assert counts["flags removed"] + counts["flags renamed"] == len(lost)
    assert counts["variables added"] == len(set(new.environment) - set(old.environment))


def test_the_overview_names_what_is_known_of_these_releases_alone() -> None:
    notable = overview(schema.load("0.17.0"), schema.load("0.18.0")).notable
    assert {change.since for change in notable} == {"0.18.0"}
    assert "--swap-space" in {change.name for change in notable}
    assert notable == tuple(c for c in changes.changes_between("0.17.0", "0.18.0") if c in notable)


# -- the command


def _run(*words: str) -> tuple[int, str]:
    """Return the command's status as `gpufleet` passes it on, and what it printed."""
    runner = CliRunner()
    with runner.isolation() as streams:
        status = flags.main(["diff", *words], prog_name="flags", standalone_mode=False)
        text = streams[0].getvalue().decode()
    return status or 0, text


def test_the_status_says_whether_something_breaks() -> None:
    assert _run("0.17.0", "0.18.0")[0] == 0
    assert _run("0.17.0", "0.18.0", "--", "MODEL", "--max-model-len", "4k")[0] == 0
    status, text = _run("0.17.0", "0.18.0", "--", "MODEL", "--swap-space", "4", "--seed", "1")
    assert status == 1
    assert "! --swap-space 4 (since 0.18.0)" in text
    assert "vllm serve MODEL --seed 1" in text


def test_variables_may_stand_on_the_command_line() -> None:
    status, text = _run("0.11.0", "0.33.0", "--env", "VLLM_USE_V1=1", "--", "MODEL")
    assert status == 1
    assert "! VLLM_USE_V1=1" in text


def test_an_unknown_release_is_refused() -> None:
    with pytest.raises(FleetError, match="does not know this release"):
        _run("0.15.7", "0.18.0")


SETTINGS = """
vllm:
  environment: {VLLM_ATTENTION_BACKEND: FLASHINFER}
serving:
  llama:
    model: /models/llama
    tensor_parallel: 2
    flags:
      swap-space: 4
      enable-prefix-caching: true
      enable-lora: false
      seed: null
  qwen:
    model: /models/qwen
    flags: {limit-mm-per-prompt: {image: 4}}
    environment: {VLLM_USE_V1: "1"}
"""


def test_settings_are_read_as_units_pass_them(tmp_path: Path) -> None:
    file = tmp_path / "gpu.yml"
    file.write_text(SETTINGS)
    llama, qwen = from_file(file)
    assert llama.where == "serving.llama"
    assert llama.argv == (
        "/models/llama",
        "--tensor-parallel-size",
        "2",
        "--swap-space",
        "4",
        "--enable-prefix-caching",
        "--no-enable-lora",
    )
    assert qwen.argv == ("/models/qwen", "--limit-mm-per-prompt", '{"image":4}')
    assert qwen.environment == {"VLLM_ATTENTION_BACKEND": "FLASHINFER", "VLLM_USE_V1": "1"}


def test_every_model_of_the_settings_is_told_apart(tmp_path: Path) -> None:
    file = tmp_path / "gpu.yml"
    file.write_text(SETTINGS)
    status, text = _run("0.11.0", "0.18.0", "--settings", str(file), "--json")
    assert status == 1
    llama, qwen = json.loads(text)["servers"]
    assert {one["name"] for one in llama["differences"] if one["breaks"]} == {
        "--swap-space",
        "VLLM_ATTENTION_BACKEND",
    }
    assert {one["name"] for one in qwen["differences"] if one["breaks"]} == {
        "VLLM_ATTENTION_BACKEND",
        "VLLM_USE_V1",
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gpus: {}", "has no `serving`"),
        ("serving: {a: 1}", "serving.a must be a mapping"),
        ("serving: {a: {flags: [x]}}", "serving.a.flags must be a mapping"),
        ("serving: {a: {", "gpu.yml"),
    ],
)
def test_settings_that_are_none_are_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "gpu.yml"
    file.write_text(text)
    with pytest.raises(FleetError, match=said):
        from_file(file)


def test_a_page_says_that_nothing_changes() -> None:
    assert "Nothing changes" in diff_page(ServerFlags(("MODEL",)), (), ("MODEL",), 80)


def test_what_only_a_person_can_decide_is_named() -> None:
    yours = ServerFlags(("MODEL", "--quantization", "bitsandbytes"))
    found = diff(schema.load("0.24.0"), schema.load("0.28.0"), yours)
    assert rewrite_command_line(yours, found, schema.load("0.28.0")) is None
    assert "you must decide: --quantization" in diff_page(yours, found, None, 80)


def test_a_command_line_that_is_still_refused_is_not_called_right() -> None:
    """The option has moved, and now needs another one beside it."""
    yours = ServerFlags(("MODEL", "--guided-decoding-disable-any-whitespace"))
    new = schema.load("0.20.2")
    found = diff(schema.load("0.11.0"), new, yours)
    assert [one.rewritten is not None for one in found if one.breaks] == [True]
    assert rewrite_command_line(yours, found, new) is None
    assert "still refuses" in diff_page(yours, found, None, 80)

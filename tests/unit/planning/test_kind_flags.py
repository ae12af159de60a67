"""Which kind a model is served as, by what is declared, its flags, its files and what runs."""

from __future__ import annotations

from typing import Any

import pytest

from gpufleet.errors import FleetError
from gpufleet.flags import served_classes
from gpufleet.planning.kind_flags import kind_problems, resolve_kind, resolve_kinds
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.serving_settings import Served
from gpufleet.sizing.model_kinds import UNREAD, KindReading, read_kind
from tests.support.rows import each_row

DECODER = read_kind({"architectures": ["Qwen3ForCausalLM"]})
EMBEDDING_DECODER = read_kind({"architectures": ["Qwen3ForCausalLM"]}, [{"type": "x"}])
ENCODER = read_kind({"architectures": ["BertModel"]})
CROSS = read_kind({"architectures": ["BertForSequenceClassification"], "num_labels": 1})
SPEECH = read_kind({"architectures": ["WhisperForConditionalGeneration"]})
ODD = read_kind({"architectures": ["MyOwnNetwork"]})


def served(**changes: Any) -> Served:
    return Served.model_validate({"model": "/srv/m", **changes})


def resolved(reading: KindReading, **changes: Any) -> tuple[str, dict[str, Any]]:
    found = resolve_kind("m", served(**changes), reading)
    return found.kind, {each.name: each.value for each in found.flags}


@each_row(
    ("reading", "changes", "kind", "flags"),
    [
        (DECODER, {}, "generate", {}),
        (ENCODER, {}, "embed", {"runner": "pooling"}),
        (CROSS, {}, "rerank", {"runner": "pooling"}),
        (CROSS, {"kind": "reward"}, "reward", {"runner": "pooling"}),
        (SPEECH, {}, "transcribe", {}),
        (EMBEDDING_DECODER, {}, "embed", {"runner": "pooling"}),
        (EMBEDDING_DECODER, {"kind": "generate"}, "generate", {"runner": "generate"}),
        (EMBEDDING_DECODER, {"flags": {"runner": "generate"}}, "generate", {}),
        (DECODER, {"kind": "embed"}, "embed", {"runner": "pooling"}),
        (DECODER, {"flags": {"runner": "pooling"}}, "embed", {}),
        (DECODER, {"flags": {"convert": "embed"}}, "embed", {"runner": "pooling"}),
        (
            DECODER,
            {"kind": "rerank", "flags": {"convert": "classify"}},
            "rerank",
            {"runner": "pooling"},
        ),
        (UNREAD, {"kind": "classify"}, "classify", {"runner": "pooling"}),
    ],
)
def test_a_kind_brings_the_flags_that_its_class_needs(
    reading: KindReading, changes: dict[str, Any], kind: str, flags: dict[str, Any]
) -> None:
    assert resolved(reading, **changes) == (kind, flags)


@each_row(
    ("reading", "changes", "says"),
    [
        (
            ENCODER,
            {"kind": "generate"},
            "the model's class is BertModel, and such a model can only be embed",
        ),
        (DECODER, {"kind": "transcribe"}, "can only be embed or generate"),
        (DECODER, {"kind": "rerank"}, "classifier_from_token"),
        (SPEECH, {"kind": "embed"}, "can only be transcribe"),
        (ENCODER, {"flags": {"runner": "generate"}}, "needs the pooling runner: remove the flag"),
        (DECODER, {"kind": "generate", "flags": {"runner": "pooling"}}, "does not use pooling"),
        (DECODER, {"flags": {"convert": "classify"}}, "declare `kind: rerank` or"),
    ],
)
def test_a_kind_that_a_model_cannot_be_is_refused_with_what_it_can_be(
    reading: KindReading, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(FleetError) as caught:
        resolve_kind("m", served(**changes), reading)
    assert says in str(caught.value)
    assert str(caught.value).startswith("serving.m.")


@pytest.mark.parametrize("kind", ["generate", "embed"])
def test_the_flags_do_not_depend_on_whether_the_files_can_be_read(kind: str) -> None:
    """Else a Hub that does not answer would restart the model."""
    for reading in (EMBEDDING_DECODER, UNREAD):
        runner = "generate" if kind == "generate" else "pooling"
        assert resolved(reading, kind=kind) == (kind, {"runner": runner})
    read = resolve_kind("m", served(), EMBEDDING_DECODER)
    assert resolve_kind("m", served(), UNREAD, read.kind).flags == read.flags


def test_what_is_not_known_is_said_and_asked_for_text() -> None:
    found = resolve_kind("m", served(), ODD)
    assert found.kind == "generate"
    assert (
        "serving.m.kind: gpufleet cannot determine the kind: the model's class is MyOwnNetwork"
        in found.remark
    )
    assert "`rerank`" in found.remark
    assert resolve_kind("m", served(), ODD, "generate").remark == found.remark


def test_what_runs_stays_what_it_is_while_its_files_cannot_be_read() -> None:
    """A Hub that does not answer must not restart an embedder as something else."""
    found = resolve_kind("m", served(), UNREAD, "embed")
    assert (found.kind, found.remark) == ("embed", "")


def test_files_that_cannot_be_read_are_said_once_by_the_plan_itself() -> None:
    assert resolve_kind("m", served(), UNREAD).remark == ""


def node(version: str = "0.32.0", **model: Any) -> NodeSettings:
    vllm = {"version": version, "lock": "locks/v.txt", "listen": "127.0.0.1"}
    return NodeSettings.model_validate({"vllm": vllm, "serving": {"m": {"model": "/m", **model}}})


def test_speech_needs_a_lock_that_reads_sound() -> None:
    settings, readings = {"a": node()}, {"m": SPEECH}
    with pytest.raises(FleetError, match=r"locks/v.txt does not contain the package soundfile"):
        resolve_kinds(settings, readings, locks={"locks/v.txt": "vllm==0.32.0\n"})
    whole = {"locks/v.txt": "numpy==2.0\nsoundfile==0.13.1 \\\n"}
    assert resolve_kinds(settings, readings, locks=whole).kind("m") == "transcribe"


def test_nothing_is_refused_where_nothing_is_judged() -> None:
    """To look at what runs, a kind that cannot be stops nothing."""
    found = resolve_kinds({"a": node(kind="generate")}, {"m": ENCODER}, judged=False)
    assert found.kind("m") == "generate"


def test_settings_that_contradict_themselves_are_found_without_the_models_files() -> None:
    wrong = node(kind="rerank", flags={"runner": "generate"})
    assert ["needs the pooling runner" in each for each in kind_problems({"a": wrong})] == [True]
    assert kind_problems({"a": node(flags={"convert": "classify"})}) == ()
    assert kind_problems({"a": node(kind="rerank")}) == ()


@each_row(
    "reading, objectives, refused",
    [
        (ENCODER, {"ttft_p99_seconds": 1}, ["ttft_p99_seconds"]),
        (CROSS, {"ttft_p99_seconds": 1, "itl_p99_seconds": 1}, ["ttft_p99_seconds",
                                                                "itl_p99_seconds"]),
        (ENCODER, {"e2e_p99_seconds": 1}, []),
        (DECODER, {"ttft_p99_seconds": 1, "itl_p99_seconds": 1}, []),
        (SPEECH, {"ttft_p99_seconds": 1}, []),
    ],
)  # fmt: skip
def test_what_makes_no_tokens_has_no_objective_for_them(
    reading: KindReading, objectives: dict[str, float], refused: list[str]
) -> None:
    found: tuple[str, ...] = ()
    try:
        resolve_kinds({"a": node(objectives=objectives)}, {"m": reading})
    except FleetError as error:
        found = error.problems
    assert [each.split(":")[0] for each in found] == [
        f"serving.m.objectives.{name}" for name in refused
    ]
    assert all("write `e2e_p99_seconds`" in each for each in found)


@each_row(
    "version, name, flags, words",
    [
        # Speech and the like are run by vLLM's own code alone.
        ("0.29.0", "FireRedLIDForConditionalGeneration", {}, "remark"),
        ("0.19.0", "JinaEmbeddingsV5Model", {}, "remark"),
        ("0.19.0", "JinaEmbeddingsV5Model", {"model-impl": "vllm"}, "refused"),
        ("0.20.1", "JinaEmbeddingsV5Model", {"model-impl": "vllm"}, ""),
        ("0.19.0", "XLMRobertaModel", {}, ""),
        # Made from Qwen3ForCausalLM.
        ("0.32.0", "Qwen3ForSequenceClassification", {"model-impl": "vllm"}, ""),
        # In no release's lists: a publisher's own, or a plugin's.
        ("0.32.0", "MyOwnEmbeddingModel", {"model-impl": "vllm"}, ""),
        # Its lists are not in the package.
        ("0.99.0", "JinaEmbeddingsV5Model", {"model-impl": "vllm"}, ""),
    ],
)
def test_a_class_that_the_release_has_no_code_for_is_named(
    version: str, name: str, flags: dict[str, Any], words: str
) -> None:
    reading = read_kind({"architectures": [name]})
    settings, problems, remarks = {"a": node(version, flags=flags)}, "", ""
    try:
        found = resolve_kinds(settings, {"m": reading})
    except FleetError as error:
        [problems] = error.problems
    else:
        remarks = " ".join(found.remarks)
    said = {"refused": problems, "remark": remarks}
    for which, text in said.items():
        assert (f"vLLM {version} has no code for {name}" in text) == (which == words)
    if words == "refused":
        assert "vLLM 0.20.0 and newer have this code: set `vllm.version`" in problems
    if name.startswith("FireRed"):
        assert "was the last release that had this code" in remarks


@each_row(
    "more, refused",
    [
        ({}, False),
        ({"flags": {"max-num-seqs": 3}}, True),
        ({"flags": {"max-num-seqs": 4}}, False),
        ({"flags": {"max-num-seqs": 8}, "context": 128}, True),
        ({"flags": {"max-num-seqs": 3, "max-num-batched-tokens": 1500}}, False),
        ({"flags": {"max-num-batched-tokens": 1499}}, True),
        ({"flags": {"max-num-batched-tokens": "2k"}}, False),
        ({"flags": {"max-num-batched-tokens": "1k"}}, True),
        ({"flags": {"max-num-seqs": 3}, "presets": ["speech"]}, False),
        ({"presets": ["speech"]}, False),
    ],
)
def test_a_step_has_to_take_what_a_whisper_hears(more: dict[str, Any], refused: bool) -> None:
    reading = read_kind({"architectures": ["WhisperForConditionalGeneration"]})
    problems: tuple[str, ...] = ()
    try:
        resolve_kinds({"a": node("0.32.0", **more)}, {"m": reading})
    except FleetError as error:
        problems = error.problems
    assert any("write `max-num-batched-tokens: 1500`" in each for each in problems) == refused


def test_speech_is_refused_where_the_release_has_no_code_for_it() -> None:
    """No package runs it in its stead."""
    release, newest = served_classes.releases()[0], served_classes.releases()[-1]
    [name, *_] = [
        name
        for name, uses in (served_classes.classes(newest) or {}).items()
        if uses == ("transcribe",) and served_classes.has_code(release, name, pools=False) is False
    ]
    reading = read_kind({"architectures": [name]})
    with pytest.raises(FleetError, match=f"vLLM {release} has no code for {name}"):
        resolve_kinds({"a": node(release, kind="transcribe")}, {"m": reading})

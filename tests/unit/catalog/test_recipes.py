"""Published recipes: each is taken by the releases that we know, and by our own planner."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from gpufleet.catalog import gpu_models, recipes
from gpufleet.errors import FleetError
from gpufleet.flags import schema
from gpufleet.importer.convert import Imported, convert
from gpufleet.importer.server import Launch
from gpufleet.planning.candidates import evaluate_divisions
from gpufleet.planning.kind_flags import resolve_kind
from gpufleet.planning.parallelism import Kind
from gpufleet.settings.serving_settings import Served
from gpufleet.sizing.architectures.description import ModelFiles, describe
from gpufleet.sizing.architectures.overrides import with_overrides
from gpufleet.sizing.fit import size
from gpufleet.sizing.model_kinds import ALL, POOLS, read_kind
from tests.support.models import MODELS, described

NEWEST = schema.versions()[-1]
# What the recipes say and the newest release refuses: options, values and keys that are gone, and
# a size that has to divide the one that the plan chooses.
REFUSED = {
    "--tool-call-parser-plugin nemotron_toolcall_parser_no_streaming.py",
    "--tool-call-parser nemotron_json",
    "--enable-auto-tool-choice",
    "--attention_config.use_fp4_indexer_cache True",
    "--attention_config.use_fp4_indexer_cache=True",
    '--compilation-config {"use_inductor": false}',
    "--decode-context-parallel-size 8",
}
BOARDS = {
    "A100": Kind("NVIDIA A100-SXM4-80GB", 81920, (8, 0), (8,), NEWEST),
    "H100": Kind("NVIDIA H100 80GB HBM3", 81559, (9, 0), (8,), NEWEST),
    "H200": Kind("NVIDIA H200", 143771, (9, 0), (8,), NEWEST),
    "B200": Kind("NVIDIA B200", 183359, (10, 0), (8,), NEWEST),
    "GB200": Kind("NVIDIA GB200", 189471, (10, 0), (4,), NEWEST),
}


def imported(
    recipe: recipes.Recipe, variant: recipes.Variant, gpu: str, features: tuple[str, ...]
) -> Imported:
    found = recipes.addition(
        recipe,
        variant,
        gpu=gpu,
        capability=gpu_models.card(gpu).compute_capability,
        features=features,
    )
    launch = Launch(variant.model, (variant.model, *found.arguments), found.environment)
    return convert([launch], schema.load(NEWEST))


def test_the_newest_release_takes_every_word_of_the_recipes_but_those_that_are_gone() -> None:
    refused = {
        word[1]
        for recipe in recipes.all_recipes()
        for variant in recipe.variants
        for gpu in ("H100", "B200")
        for note in imported(recipe, variant, gpu, tuple(recipe.optional)).notes
        if note.decide and (word := re.match("`(--[^`]+)`", note.text))
    }
    assert refused == REFUSED


def test_the_planner_judges_every_recipe_whose_config_is_known_and_most_fit_one_machine() -> None:
    fits, judged = set(), set()
    for recipe in recipes.all_recipes():
        for variant in recipe.variants:
            name = variant.model.replace("/", "--")
            if not (MODELS / f"{name}.json").is_file():
                continue
            for gpu in {*recipe.verified_on} & {*BOARDS}:
                [settings] = imported(recipe, variant, gpu, ()).settings["serving"].values()
                served = Served.model_validate({**settings, "revision": "0" * 40})
                found = evaluate_divisions(
                    "model", served, described(name), BOARDS[gpu], 1, sizer=size
                )
                assert all(each.reason for each in found.candidates), (name, gpu)
                judged.add(name)
                if found.chosen:
                    fits.add(name)
    # What does not is for several machines (Kimi-K2), or starts with a shorter context alone.
    assert len(fits) > len(judged) / 2 > 10


QWEN3 = json.loads((MODELS / "Qwen--Qwen3-0.6B.json").read_text())["config"]
QWEN2 = json.loads((MODELS / "Qwen--Qwen2-1.5B.json").read_text())["config"]
XLM = {
    "hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 24,
    "intermediate_size": 4096, "vocab_size": 250002, "max_position_embeddings": 8194,
    "type_vocab_size": 1, "torch_dtype": "float32",
}  # fmt: skip
# The class of each, as vLLM's documentation lists it, in a config of its size or of its kin's.
POOLED: dict[str, tuple[dict[str, Any], list[Any] | None]] = {
    "Qwen/Qwen3-Embedding-0.6B": (QWEN3, [{"type": "sentence_transformers.models.Transformer"}]),
    "BAAI/bge-m3": ({**XLM, "architectures": ["XLMRobertaModel"]}, [{"type": "Transformer"}]),
    "BAAI/bge-reranker-v2-m3": (
        {**XLM, "architectures": ["XLMRobertaForSequenceClassification"], "num_labels": 1},
        None,
    ),
    "Qwen/Qwen3-Reranker-0.6B": (QWEN3, None),
    "mixedbread-ai/mxbai-rerank-base-v2": (QWEN2, None),
    "jason9693/Qwen2.5-1.5B-apeach": (
        {**QWEN2, "architectures": ["Qwen2ForSequenceClassification"], "num_labels": 2},
        None,
    ),
    "Skywork/Skywork-Reward-V2-Qwen3-0.6B": (
        {**QWEN3, "architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1},
        None,
    ),
}
# whisper-large-v3-turbo's sizes.
WHISPER = {
    "architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper",
    "torch_dtype": "float16", "vocab_size": 51866, "num_mel_bins": 128, "d_model": 1280,
    "encoder_layers": 32, "decoder_layers": 4, "encoder_attention_heads": 20,
    "decoder_attention_heads": 20, "encoder_ffn_dim": 5120, "decoder_ffn_dim": 5120,
    "max_source_positions": 1500, "max_target_positions": 448,
}  # fmt: skip
L4 = Kind("NVIDIA L4", 23034, (8, 9), (1,), NEWEST)


@pytest.mark.parametrize("name", sorted(POOLED))
def test_a_recipe_of_a_model_without_text_has_the_kind_that_its_class_can_be(name: str) -> None:
    config, modules = POOLED[name]
    recipe = recipes.find(name)
    found = imported(recipe, recipe.variants[0], "L4", ())
    [settings] = found.settings["serving"].values()
    served = Served.model_validate({**settings, "kind": recipe.kind, "revision": "0" * 40})
    files = with_overrides(ModelFiles(config), served.flags.get("hf-overrides", {}))
    reading = read_kind(files.config, modules)

    assert resolve_kind("m", served, reading).kind == recipe.kind
    assert recipe.kind in POOLS
    planned = evaluate_divisions("model", served, describe(files), L4, 1, sizer=size)
    assert planned.chosen, [each.reason for each in planned.candidates]


def test_every_recipe_of_a_model_without_text_is_held_to_that() -> None:
    assert {each.model for each in recipes.all_recipes() if each.kind in POOLS} == {*POOLED}


def test_a_whisper_by_its_recipe_is_planned() -> None:
    recipe = recipes.find("openai/whisper-large-v3-turbo")
    [settings] = imported(recipe, recipe.variants[1], "L4", ()).settings["serving"].values()
    served = Served.model_validate({**settings, "kind": recipe.kind, "revision": "0" * 40})
    files = ModelFiles(WHISPER)
    assert resolve_kind("m", served, read_kind(files.config)).kind == "transcribe"

    planned = evaluate_divisions("model", served, describe(files), L4, 1, sizer=size)
    assert planned.chosen, [each.reason for each in planned.candidates]


def test_every_kind_has_one_recipe_of_each_model() -> None:
    """Pictures are in vLLM's own recipes, which name no kind: the files say it."""
    found = recipes.all_recipes()
    assert {each.kind for each in found} - {None} == ALL - {"generate"}
    assert len({each.model for each in found}) == len(found)
    assert recipes.find("Qwen/Qwen2.5-VL-7B-Instruct")


def test_a_recipe_names_what_its_source_is_a_file_of() -> None:
    assert recipes.source_project(recipes.find("BAAI/bge-m3")) == "vLLM's documentation"
    assert recipes.source_project(recipes.find("Qwen/Qwen3-32B")) == "vLLM's recipes"


@pytest.mark.parametrize("name", ["Qwen/Qwen3-32B-FP8", "qwen/qwen3-32b", "Qwen/Qwen3-32B-AWQ"])
def test_a_recipe_is_found_by_the_name_of_any_of_its_checkpoints_in_any_case(name: str) -> None:
    assert recipes.find(name).model == "Qwen/Qwen3-32B"


@pytest.mark.parametrize(
    ("name", "near"), [("qwen3-32", "Qwen/Qwen3-32B"), ("openai/gpt-os-20b", "openai/gpt-oss-20b")]
)
def test_an_unknown_model_is_refused_with_near_names(name: str, near: str) -> None:
    with pytest.raises(FleetError, match=re.escape(near)):
        recipes.find(name)


def test_what_is_nearer_to_the_gpu_stands_later_and_wins() -> None:
    every = recipes.Addition(arguments=("--a", "all"), environment={"A": "all", "B": "all"})
    hopper = recipes.Addition(arguments=("--a", "hopper"), environment={"A": "hopper"})
    h200 = recipes.Addition(arguments=("--a", "h200"))
    variant = recipes.Variant(model="m", precision="fp8", arguments=("--v", "1"), on={"H200": h200})
    recipe = recipes.Recipe(
        model="m",
        since="0.20.0",
        source="m.yaml",
        arguments=("--base", "1"),
        features={"tools": ("--t", "1")},
        optional={"drafts": ("--d", "1")},
        on={"hopper": hopper, "nvidia": every},
        variants=(variant,),
    )
    without = recipes.addition(recipe, variant)
    assert without.arguments == ("--base", "1", "--t", "1", "--v", "1", "--a", "all")
    on_h200 = recipes.addition(recipe, variant, gpu="H200", capability=(9, 0), features=("drafts",))
    assert on_h200.arguments == (
        *("--base", "1", "--t", "1", "--d", "1", "--v", "1"),
        *("--a", "all", "--a", "hopper", "--a", "h200"),
    )
    assert on_h200.environment == {"A": "hopper", "B": "all"}
    with pytest.raises(FleetError, match=r"--with draft: .* Its optional features: drafts"):
        recipes.addition(recipe, variant, features=("draft",))

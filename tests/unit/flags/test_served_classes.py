"""Which classes a release has code for: its own lists, and what we read of a class' name."""

from __future__ import annotations

from gpufleet.flags import schema, served_classes
from gpufleet.sizing.model_kinds import read_kind
from tests.support.rows import each_row

KINDS = {
    "generate": {"generate"},
    "embed": {"embed"},
    "classify": {"rerank", "classify", "reward"},
    "reward": {"reward"},
    "transcribe": {"transcribe"},
}
# A vector for each token, too; a language's name as an answer to sound.
OTHERS = {"ColPaliForRetrieval", "FireRedLIDForConditionalGeneration"}


def test_lists_are_of_releases_whose_flags_are_known() -> None:
    assert set(served_classes.releases()) <= set(schema.versions())
    assert served_classes.releases()[-1] == schema.versions()[-1]


def test_a_class_can_be_declared_as_what_any_release_lists_it_for() -> None:
    wrong = {
        name
        for version in served_classes.releases()
        for name, uses in (served_classes.classes(version) or {}).items()
        for use in uses
        if use in KINDS and not read_kind({"architectures": [name]}).possible & KINDS[use]
    }
    assert wrong == OTHERS


@each_row(
    "version, name, pools, found",
    [
        ("0.32.0", "XLMRobertaModel", True, True),
        ("0.32.0+cpu", "XLMRobertaModel", True, True),
        # Converted from the class that completes text, where it is to pool.
        ("0.32.0", "Qwen3Model", True, True),
        ("0.32.0", "Qwen3Model", False, None),
        ("0.19.0", "JinaEmbeddingsV5Model", True, False),
        ("0.32.0", "MotifForCausalLM", False, None),
        ("0.33.0", "AquilaForCausalLM", False, False),
        ("0.99.0", "XLMRobertaModel", True, None),
    ],
)
def test_code_is_there_is_not_or_is_not_known(
    version: str, name: str, pools: bool, found: bool | None
) -> None:
    assert served_classes.has_code(version, name, pools=pools) is found

"""Encoders have weights and no cache: they are sized, and planned, by their weights."""

from gpufleet.planning.candidates import Verdict, evaluate_divisions
from gpufleet.planning.parallelism import Kind
from gpufleet.settings.serving_settings import Served
from gpufleet.sizing.architectures.description import ModelFiles, describe
from gpufleet.sizing.architectures.registry import architecture
from gpufleet.sizing.fit import size
from gpufleet.sizing.options import Options
from tests.support.rows import each_row

LARGE = {
    "architectures": ["BertModel"],
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "intermediate_size": 4096,
    "vocab_size": 30522,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "torch_dtype": "float32",
}
XLM = {**LARGE, "vocab_size": 250002, "max_position_embeddings": 514, "type_vocab_size": 1}
L4 = Kind("NVIDIA L4", 23034, (8, 9), (1,), "0.32.0")
POOLER = 1024 * 1024 + 1024


@each_row(
    ("config", "published"),
    [
        (LARGE, 335_141_888 - POOLER),  # BERT Large, as published with its pooler
        ({**XLM, "architectures": ["XLMRobertaModel"]}, 559_890_432 - POOLER),  # XLM-R Large
        (
            {**XLM, "architectures": ["XLMRobertaForSequenceClassification"], "num_labels": 1},
            559_890_432 + 1024 + 1,  # a dense layer of the pooler's size, and a row
        ),
    ],
)
def test_an_encoder_has_as_many_numbers_as_are_published(config, published):
    assert architecture(config).parameters == published


@each_row(("config", "longest"), [(LARGE, 512), ({**XLM, "architectures": ["RobertaModel"]}, 512)])
def test_the_positions_of_the_padding_are_of_no_token(config, longest):
    assert architecture(config).longest_length((0, 32, 0)) == longest


def sized(**changes):
    asked = {"gpu_memory_gib": 22.03, "vllm": (0, 32, 0), "compute_capability": (8, 9), **changes}
    return size(describe(ModelFiles(LARGE)), Options(**asked))


def test_an_encoder_fits_by_its_weights_and_holds_no_tokens():
    found = sized()

    assert found.fits, found.reasons
    assert not found.reasons
    assert (found.kv_cache_tokens, found.kv_bytes_per_token_per_gpu) == (0, 0)
    assert found.max_concurrency == found.max_num_seqs
    assert abs(found.weights_bytes_per_gpu - 2 * 334_092_288) < 1 << 20


def test_an_encoder_that_does_not_fit_for_certain_is_none():
    found = sized(gpu_memory_utilization=0.04)

    assert not found.fits
    assert "the weights take 0.6" in found.reasons[0]


def test_an_encoder_is_planned():
    served = Served.model_validate({"model": "/srv/bge", "concurrency": 16})
    description = describe(ModelFiles(LARGE))
    chosen = evaluate_divisions("bge", served, description, L4, 1, sizer=size).chosen

    assert chosen.verdict is Verdict.FITS
    assert chosen.division.gpus == 1

"""Encoders have weights and no cache: they are sized, and planned, by their weights."""

from gpufleet.planning.candidates import Verdict, evaluate_divisions
from gpufleet.planning.parallelism import Kind
from gpufleet.settings.serving_settings import Served
from gpufleet.sizing.architectures.description import ModelFiles, describe
from gpufleet.sizing.architectures.registry import architecture
from gpufleet.sizing.fit import size
from gpufleet.sizing.options import Options
from gpufleet.sizing.rank_weights import SIZES, Sharding
from gpufleet.sizing.weights import weight_bytes
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


NOMIC = {
    "architectures": ["NomicBertModel"], "n_embd": 768, "n_layer": 12, "n_head": 12,
    "n_inner": 3072, "vocab_size": 30528, "type_vocab_size": 2, "activation_function": "swiglu",
    "qkv_proj_bias": False, "n_positions": 8192, "max_trained_positions": 2048,
}  # fmt: skip
NOMIC_MOE = {
    **NOMIC, "vocab_size": 250048, "type_vocab_size": 1, "activation_function": "gelu",
    "qkv_proj_bias": True, "num_experts": 8, "moe_top_k": 2, "moe_every_n_layers": 2,
}  # fmt: skip
MODERN = {
    "architectures": ["ModernBertModel"], "hidden_size": 768, "num_attention_heads": 12,
    "num_hidden_layers": 22, "intermediate_size": 1152, "vocab_size": 50368,
    "max_position_embeddings": 8192, "local_attention": 128, "global_attn_every_n_layers": 3,
}  # fmt: skip
MODERN_LARGE = {
    **MODERN, "hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 28,
    "intermediate_size": 2624,
}  # fmt: skip
GTE = {
    "architectures": ["GteNewModel"], "hidden_size": 768, "num_attention_heads": 12,
    "num_hidden_layers": 12, "intermediate_size": 3072, "vocab_size": 30528,
    "type_vocab_size": 0, "max_position_embeddings": 8192,
}  # fmt: skip


@each_row(
    ("config", "published", "digits"),
    [
        # As their model cards have them: 137M, 475M, 149M, 395M, 137M, 305M, 305M.
        (NOMIC, 136_731_648, 0),  # nomic-embed-text-v1.5
        (NOMIC_MOE, 475_292_928, 0),  # nomic-embed-text-v2-moe
        (MODERN, 149_000_000, 6),  # ModernBERT-base
        (MODERN_LARGE, 395_000_000, 6),  # ModernBERT-large
        (GTE, 136_776_192, 0),  # gte-base-en-v1.5
        ({**GTE, "vocab_size": 250048, "type_vocab_size": 1}, 305_000_000, 6),  # multilingual
        ({**GTE, "architectures": ["GteModel"], "vocab_size": 250048, "type_vocab_size": 1},
         305_000_000, 6),  # snowflake-arctic-embed-m-v2.0
    ],
)  # fmt: skip
def test_encoders_with_rotary_positions_have_as_many_numbers_as_are_published(
    config, published, digits
):
    """To the number, or to the million where no more is published."""
    assert round(architecture(config).parameters, -digits) == published


def test_a_head_that_scores_is_counted():
    scoring = {**MODERN, "architectures": ["ModernBertForSequenceClassification"], "num_labels": 3}

    more = architecture(scoring).parameters - architecture(MODERN).parameters

    assert more == 768 * 768 + 768 + 3 * 768 + 3


def test_an_encoder_may_be_asked_for_more_than_it_was_trained_for():
    assert architecture(NOMIC).max_model_len == 2048
    assert architecture(NOMIC).longest_length((0, 32, 0)) == 8192


@each_row("config", [NOMIC, NOMIC_MOE, MODERN, GTE])
def test_an_encoder_with_rotary_positions_fits_by_its_weights(config):
    options = Options(gpu_memory_gib=22.03, vllm=(0, 32, 0), compute_capability=(8, 9))
    found = size(describe(ModelFiles({**config, "torch_dtype": "float32"})), options)

    assert found.fits, found.reasons
    tables = 2 * 8192 * 64 * 4
    weights = 2 * architecture(config).parameters
    assert weights < found.weights_bytes_per_gpu < weights + tables + (1 << 20)


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
    assert "the weights need 0.6" in found.reasons[0]


def test_an_encoder_is_planned():
    served = Served.model_validate({"model": "/srv/bge", "concurrency": 16})
    description = describe(ModelFiles(LARGE))
    chosen = evaluate_divisions("bge", served, description, L4, 1, sizer=size).chosen

    assert chosen.verdict is Verdict.FITS
    assert chosen.division.gpus == 1


@each_row("objective", ["balanced", "throughput"])
def test_a_plan_names_no_cache_that_an_encoder_does_not_keep(objective):
    served = Served.model_validate({"model": "/srv/bge", "objective": objective})
    description = describe(ModelFiles(LARGE))
    pair = Kind("NVIDIA L4", 23034, (8, 9), (2,), "0.32.0")
    found = evaluate_divisions("bge", served, description, pair, 1, sizer=size).chosen

    assert "the model keeps no KV cache, and " in found.reason
    assert "remains unused" in found.reason


def test_colbert_is_an_encoder_and_a_layer_to_a_tokens_vector():
    found = architecture({**LARGE, "architectures": ["HF_ColBERT"], "dim": 128})

    assert found.parameters - architecture(LARGE).parameters == 128 * 1024


def test_the_first_matrix_of_a_modern_bert_is_divided_since_0_32():
    """Before, each rank had all of it."""
    model = architecture(MODERN)
    before, since = (
        [weight_bytes(model, None, Sharding(tensor=n), vllm=vllm)[0].bytes for n in (1, 2)]
        for vllm in ((0, 31, 0), (0, 32, 0))
    )
    first = 22 * 2 * 1152 * 768 * SIZES[model.dtype]

    assert before[0] == since[0]
    assert before[1] - since[1] == first // 2

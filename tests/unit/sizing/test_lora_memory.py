"""What adapters take, by the shapes that vLLM makes; what is not known of them is said."""

import json

from gpufleet.sizing.architectures.registry import architecture
from gpufleet.sizing.fit import size
from gpufleet.sizing.lora_memory import Lora, lora_bytes, why_not_counted
from gpufleet.sizing.rank_weights import Sharding
from tests.support.checkout import ROOT
from tests.support.rows import each_row
from tests.unit.sizing.test_fit import model, options

SMALL = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "intermediate_size": 1024,
    "vocab_size": 1000,
}
LLAMA = {**SMALL, "architectures": ["LlamaForCausalLM"]}


def adapters(config, lora, tensor=1, *, first=True, last=True):
    return lora_bytes(
        architecture(config),
        lora,
        Sharding(tensor),
        range(4),
        dtype="bfloat16",
        first=first,
        last=last,
    )


@each_row(
    ("tensor", "inputs", "outputs"),
    [
        # q, k, v, gate, up see all of the hidden state; o and down a rank's part.
        (1, 5 * 512 + 512 + 1024, 512 + 2 * 128 + 2 * 1024 + 2 * 512),
        (2, 5 * 512 + 256 + 512, 256 + 2 * 64 + 2 * 512 + 2 * 512),
        # A KV head for each rank, though there are but two.
        (4, 5 * 512 + 128 + 256, 128 + 2 * 64 + 2 * 256 + 2 * 512),
    ],
)
def test_two_matrices_beside_each_linear_layer(tensor, inputs, outputs):
    """By hand: max_loras x rank x (inputs + outputs of a rank) x two bytes, in four layers."""
    assert adapters(SMALL, Lora(3, 16), tensor) == 3 * 16 * (inputs + outputs) * 2 * 4


def test_fully_sharded_adapters_divide_the_rank_of_the_first_and_the_rows_of_the_second():
    inputs = 5 * 512 // 2 + 256 + 512
    outputs = 256 + 2 * 64 + 2 * 512 + 2 * 512 // 2
    lora = Lora(1, 16, fully_sharded=True)
    assert adapters(SMALL, lora, 2) == 16 * (inputs + outputs) * 2 * 4


def test_some_classes_have_adapters_of_the_embedding_and_the_head():
    """Each of rank x (vocabulary + hidden), on the stage that has it, not divided."""
    own = 16 * (1000 + 512) * 2
    for tensor in (1, 2):
        layers = adapters(SMALL, Lora(), tensor)
        assert adapters(LLAMA, Lora(), tensor) == layers + 2 * own
        assert adapters(LLAMA, Lora(), tensor, last=False) == layers + own
        assert adapters(LLAMA, Lora(), tensor, first=False, last=False) == layers


def buffers(name, lora, tensor):
    """
    Return the bytes of vLLM's buffers on one rank, class of layer by class of layer.

    After create_lora_weights in vllm/lora/layers of 0.23.0: for each slice of a layer one tensor
    (max_loras, 1, rank, inputs) and one (max_loras, 1, outputs, rank). What the checkpoint has as
    one matrix has one slice (packed_modules_mapping).
    """
    config = json.loads((ROOT / f"tests/data/models/{name}.json").read_text())["config"]
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    head = config.get("head_dim") or hidden // heads
    rank, q, kv = lora.max_rank, heads // tensor * head, max(1, kv_heads // tensor) * head
    split = rank // tensor if lora.fully_sharded else rank  # of ColumnParallelLinear
    rows = hidden // tensor if lora.fully_sharded else hidden  # of RowParallelLinear
    fused = config["architectures"][0] == "Phi3ForCausalLM"
    qkv = [q + 2 * kv] if fused else [q, kv, kv]  # QKV, MergedQKVParallelLinearWithLoRA
    mlp = [2 * inner // tensor] if fused else [inner // tensor] * 2  # (Merged)ColumnParallel
    shapes = [
        *((split, hidden) for _ in (*qkv, *mlp)),
        *((out, rank) for out in (*qkv, *mlp)),
        *((rank, inputs) for inputs in (heads // tensor * head, inner // tensor)),  # o, down
        *((rows, rank) for _ in range(2)),
    ] * config["num_hidden_layers"]
    if config["architectures"][0] in {"LlamaForCausalLM", "Qwen3ForCausalLM"}:
        # VocabParallelEmbeddingWithLoRA and LogitsProcessorWithLoRA, whole on each rank.
        shapes += [(config["vocab_size"], rank), (hidden, rank)] * 2
    return sum(a * b for a, b in shapes) * lora.max_loras * 2


@each_row(
    "name",
    [
        "meta-llama--Meta-Llama-3.1-8B",
        "meta-llama--Meta-Llama-3.1-70B",
        "meta-llama--Llama-3.2-1B",
        "Qwen--Qwen2.5-7B-Instruct",
        "Qwen--Qwen3-32B",
        "mistralai--Mistral-Nemo-Instruct-2407",
        "google--gemma-2-9b",
        "microsoft--Phi-3.5-mini-instruct",
        "microsoft--phi-4",
    ],
)
@each_row(("count", "rank", "sharded"), [(1, 16, False), (8, 64, False), (4, 256, True)])
@each_row("tensor", [1, 2, 4])
def test_adapters_take_what_vllms_buffers_take(name, count, rank, sharded, tensor):
    described = model(name).architecture
    if described.heads % tensor:
        return  # vLLM refuses it
    lora = Lora(count, rank, fully_sharded=sharded)

    found = lora_bytes(
        described, lora, Sharding(tensor), range(len(described.layers)),
        dtype="bfloat16", first=True, last=True,
    )  # fmt: skip

    assert abs(found / buffers(name, lora, tensor) - 1) < 0.005


def test_adapters_take_from_the_cache():
    """32 adapters of rank 512 beside Llama 3.1 8B on an L40S: more than there is."""
    llama = model("meta-llama--Meta-Llama-3.1-8B")
    asked = {"gpu": "L40S", "vllm": (0, 32, 0), "max_model_len": 16384}
    plain = size(llama, options(**asked))
    few = size(llama, options(**asked, lora=Lora(4, 16)))
    many = size(llama, options(**asked, lora=Lora(32, 512)))

    assert [plain.fits, few.fits, many.fits] == [True, True, False]
    assert few.weights_bytes_per_gpu > plain.weights_bytes_per_gpu
    assert few.kv_cache_tokens < plain.kv_cache_tokens
    assert many.confidence == "certain"


@each_row(
    "name",
    [
        "Qwen--Qwen3-30B-A3B",
        "deepseek-ai--DeepSeek-V2-Lite",
        "google--gemma-3-27b-it",
        "Qwen--Qwen3.5-27B",
    ],
)
def test_adapters_whose_memory_is_not_known_are_named_and_are_no_fit(name):
    asked = {"gpu": "H200", "vllm": (0, 32, 0), "max_model_len": 8192}
    plain = size(model(name), options(**asked))
    found = size(model(name), options(**asked, lora=Lora(2, 64)))

    assert plain.fits
    assert why_not_counted(model(name).architecture)
    assert (found.fits, found.confidence) == (False, "unknown")
    assert "--enable-lora: the memory of 2 adapters of rank 64 is not counted" in found.reasons[-1]
    assert found.smallest_gpus == plain.smallest_gpus

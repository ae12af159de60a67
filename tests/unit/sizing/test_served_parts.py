"""A server that pools has no head and samples nothing; one that takes text alone has no tower."""

from gpufleet.sizing.fit import size
from gpufleet.sizing.options import is_pooling, modalities_off
from tests.support.rows import each_row
from tests.unit.sizing.test_fit import GIB, model, options

LLAMA, QWEN_VL = "meta-llama--Meta-Llama-3.1-8B", "Qwen--Qwen2.5-VL-7B-Instruct"
ASKED = {"vllm": (0, 32, 0), "max_model_len": 8192}
OFF = frozenset({"image", "video"})


def part(name, kind):
    """Return the bytes of a part's numbers in two bytes each."""
    parts = model(name).architecture.parts
    return 2 * sum(w.parameters for one in parts if one.name == kind for w in one.weights)


def test_a_pooling_server_holds_no_head_and_samples_nothing():
    """Llama 3.1 8B as an embedder: 1 GiB of head less, and no logits of 1,024 x 128,256."""
    asked = {**ASKED, "vllm": (0, 16, 0)}
    found, plain = (size(model(LLAMA), options(**asked, pooling=each)) for each in (True, False))

    less = plain.weights_bytes_per_gpu - found.weights_bytes_per_gpu
    assert abs(less - part(LLAMA, "head")) < 1 << 20
    assert plain.activation_bytes_per_gpu - found.activation_bytes_per_gpu > GIB
    assert found.kv_bytes_per_token_per_gpu == plain.kv_bytes_per_token_per_gpu
    assert "--runner pooling" in found.notes[0]


def test_a_model_whose_head_is_its_embedding_keeps_it():
    tied = "Qwen--Qwen3-0.6B"
    found, plain = (size(model(tied), options(**ASKED, pooling=each)) for each in (True, False))

    assert found.weights_bytes_per_gpu == plain.weights_bytes_per_gpu


@each_row(
    ("asked", "vllm", "gone"),
    [
        ({"language_model_only": True}, (0, 32, 0), True),
        ({"modalities_off": OFF}, (0, 32, 0), True),
        ({"modalities_off": frozenset({"image"})}, (0, 32, 0), False),
        ({"modalities_off": OFF}, (0, 12, 0), False),
        ({}, (0, 32, 0), False),
    ],
)
def test_a_tower_is_left_out_where_all_of_its_modalities_are(asked, vllm, gone):
    """Qwen 2.5 VL sees images and videos: one of them keeps the tower."""
    both = {**ASKED, "vllm": vllm}
    found = size(model(QWEN_VL), options(**both, **asked))
    whole = size(model(QWEN_VL), options(**both))

    less = whole.weights_bytes_per_gpu - found.weights_bytes_per_gpu
    assert abs(less - gone * part(QWEN_VL, "tower")) < 64 << 20
    assert (found.kv_cache_tokens > whole.kv_cache_tokens) is gone
    assert bool(asked.get("modalities_off") == OFF and not gone) is any(
        "may not load the tower" in note for note in found.notes
    )


def test_a_text_model_has_no_tower_to_leave_out():
    found = size(model(LLAMA), options(**ASKED, language_model_only=True))

    assert found == size(model(LLAMA), options(**ASKED))


@each_row(
    ("runner", "convert", "expected"),
    [
        ("pooling", None, True),
        ("auto", "embed", True),
        (None, "reward", True),
        ("generate", "none", False),
        (None, None, False),
        ("auto", "auto", False),
    ],
)
def test_what_makes_a_server_pool(runner, convert, expected):
    assert is_pooling(runner, convert) is expected


def test_limits_are_numbers_or_have_a_count():
    limits = {"image": 0, "video": {"count": 0, "num_frames": 8}, "audio": 1}
    assert modalities_off(limits) == OFF

"""`gpufleet size` as operators run it."""

import json

import pytest

from gpufleet.cli.default_release import SHIPPED
from gpufleet.cli.size_command import size, version
from gpufleet.errors import FleetError
from gpufleet.flags import schema
from tests.support import warm_command
from tests.support.checkout import ROOT
from tests.support.rows import each_row
from tests.unit.sizing.architectures.test_encoders import LARGE

MODELS = ROOT / "tests/data/models"
OURS = {
    "--gpu",
    "--gpu-memory-gib",
    "--gpu-share",  # serving.<model>.gpu_share
    "--gpus",
    "--vllm",
    "--num-speculative-tokens",  # a key of --speculative-config
    "--device",
    "--hf-endpoint",
    "--hf-token-file",
    "--offline",
    "--seconds",
    "--json",
}


def run(*arguments):
    return warm_command.run(["size", *arguments])


@pytest.fixture
def llama(tmp_path):
    document = json.loads((MODELS / "meta-llama--Meta-Llama-3.1-8B.json").read_text())
    file = tmp_path / "llama.json"
    file.write_text(json.dumps(document["config"]))
    return file


def test_every_other_option_has_vllms_name():
    """An operator copies them to `serving.<name>.flags` as they are."""
    known = schema.load(SHIPPED)
    named = {option for param in size.params for option in (*param.opts, *param.secondary_opts)}

    missing = {name for name in named - OURS if name.startswith("-") and known.flag(name) is None}
    assert missing == set()


def test_a_fit_is_a_table_and_status_0(llama):
    found = run(llama, "--gpu", "L4", "--max-model-len", "16k", "--vllm", "0.24.0")

    assert found.returncode == 0, found.stderr
    assert "LlamaForCausalLM, 8.03 billion parameters; vLLM 0.24.0" in found.stdout
    assert "131,072 bytes  per GPU" in found.stdout
    assert found.stdout.splitlines()[-1].strip() == "fits"


def test_a_decoder_beside_a_modules_json_is_sized_as_an_embedder(tmp_path, llama):
    """It has no head: vLLM drops it, whatever flags it is given."""
    llama.rename(tmp_path / "config.json")
    sizes = {}
    for name, runner in (("embed", "auto"), ("generate", "generate")):
        (tmp_path / "modules.json").write_text('[{"type": "x.models.Pooling", "path": ""}]')
        found = run(tmp_path, "--gpu", "H100", "--runner", runner, "--json")
        sizes[name] = json.loads(found.stdout)
        assert sizes[name]["kind"] == "embed"
    head = 128256 * 4096 * 2
    told = [sizes[name]["weights_bytes_per_gpu"] for name in ("generate", "embed")]
    assert told[0] - told[1] == head
    assert ", embed; vLLM" in run(tmp_path, "--gpu", "H100").stdout


def test_no_fit_says_why_and_is_status_1(llama):
    found = run(llama, "--gpu", "L4", "--max-model-len", "131072", "--vllm", "0.24.0")

    assert found.returncode == 1
    assert "does not fit" in found.stdout
    assert "one request of 131,072 tokens needs 16.00 GiB" in found.stdout
    assert "--max-model-len" in found.stdout


def test_json_is_for_programs(llama):
    found = json.loads(run(llama, "--gpu", "H100", "-tp", "2", "--json").stdout)

    assert found["architecture"] == "LlamaForCausalLM"
    assert found["parameters"] == 8_030_261_248
    assert found["kv_bytes_per_token_per_gpu"] == 65_536
    assert found["vllm"] == SHIPPED


def test_the_caches_bytes_are_read_as_vllm_reads_them(llama):
    """2G is 2 GiB: 16,384 tokens of 131,072 bytes, whatever the estimates are."""
    found = json.loads(
        run(llama, "--gpu", "H100", "--kv-cache-memory-bytes", "2G", "--json").stdout
    )

    assert found["kv_cache_tokens"] == 16_384
    assert found["estimate_error_bytes_per_gpu"] == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "you gave no GPU, so the memory of a GPU is"),
        (("--gpu", "H1000"), "--gpu H1000: the memory of this GPU is unknown"),
        (("--gpu", "H100", "--vllm", "newest"), "--vllm newest: is not a vLLM release"),
        (
            ("--gpu", "H100", "--vllm", "0.7.3"),
            "--vllm 0.7.3: gpufleet does not support releases before 0.8",
        ),
        (("--gpu", "H100", "--max-model-len", "long"), "'long' is not a number above 0"),
        (("--gpu", "MI300X"), "--gpu MI300X: is not a GPU of NVIDIA"),
        (("--gpu", "H100", "--gpu-memory-utilization", "95%"), "is not a valid number (as 0.95)"),
        (("--gpu", "H100", "-q", "int4"), "instead: remove --quantization"),
        (("--gpu", "H100", "-q", "awq"), "--quantization awq: the checkpoint is not quantized"),
    ],
)
def test_what_cannot_be_said_is_status_2_in_a_sentence(llama, arguments, says):
    found = run(llama, *arguments)

    assert found.returncode == 2
    assert says in found.stderr
    assert "Traceback" not in found.stderr
    assert found.stdout == ""


def test_the_gpus_that_are_known_are_listed_without_a_model():
    found = run("--gpu", "list")

    assert found.returncode == 0
    for name in ("H20-141GB", "GH200", "4090", "NVIDIA GeForce RTX 5060 Ti", "A100-80GB", "92.71"):
        assert name in found.stdout
    assert run("--gpu", "H100").returncode == 2


def test_flags_that_take_memory_are_counted_or_named(llama):
    """A draft model is read as the model is; where it cannot be, nothing is certified."""
    gpu = ("--gpu", "L40S", "--max-model-len", "16k", "--json")
    plain = json.loads(run(llama, *gpu).stdout)
    lora = json.loads(run(llama, *gpu, "--enable-lora", "--max-loras", "8").stdout)
    draft = {"model": str(llama), "num_speculative_tokens": 2}
    with_draft = json.loads(run(llama, *gpu, "--speculative-config", json.dumps(draft)).stdout)
    unread = {**draft, "model": "/nowhere"}
    unknown = run(llama, *gpu[:-1], "--speculative-config", json.dumps(unread))

    assert plain["fits"]
    assert lora["weights_bytes_per_gpu"] > plain["weights_bytes_per_gpu"]
    assert with_draft["weights_bytes_per_gpu"] == 2 * plain["weights_bytes_per_gpu"]
    assert unknown.returncode == 1
    assert "unknown: a part of the model's memory cannot be estimated" in unknown.stdout
    assert "/nowhere" in unknown.stdout


def test_a_context_that_is_lengthened_and_layers_outside_of_the_gpu(llama):
    longer = ("--hf-overrides", '{"max_position_embeddings": 262144}', "--max-model-len", "256K")
    assert run(llama, "--gpu", "H200", *longer).returncode == 0
    assert run(llama, "--gpu", "H200", *longer[2:]).returncode == 1
    assert run(llama, "--gpu", "H200", "--hf-overrides", "[1]").returncode == 2

    small = ("--gpu", "T4", "--max-model-len", "4096")
    assert run(llama, *small).returncode == 1
    assert run(llama, *small, "--cpu-offload-gb", "8").returncode == 0


@each_row(
    ("arguments", "says"),
    [
        (["--limit-mm-per-prompt", '{"image":-1}'], "numbers of items of 0 or more"),
        (["--speculative-config", '{"method":"ngram","num_speculative_tokens":0}'], "more than 0"),
        (
            ["--speculative-config", '{"method":"eagle3","num_speculative_tokens":3}'],
            "needs a draft model",
        ),
        (["--kv-cache-memory-bytes", "10G", "--vllm", "0.9.0"], "--kv-cache-memory-bytes"),
        (["--max-model-len", "-1", "--vllm", "0.13.0"], "`auto` is not a whole number"),
        (["--max-lora-rank", "17", "--enable-lora"], "choose from 1, 8, 16"),
        (["--quantization", "fp9"], "has no quantization `fp9`"),
        (["--dtype", "bf16", "--quantization", "w4"], "`bf16` is not an accepted value"),
    ],
)
def test_a_line_that_the_release_refuses_is_not_sized(llama, arguments, says):
    """Whatever the memory: vLLM does not start with it."""
    done = run(llama, "--gpu", "H100", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert "(vLLM 0." in done.stderr


def test_a_line_that_the_release_takes_is_sized(llama):
    """Also by a name that an older release has under another, and over every division."""
    for arguments in (
        ["--runner", "pooling", "--vllm", "0.9.0"],
        ["--max-model-len", "auto"],
        ["--no-enable-prefix-caching", "-tp", "2", "--cpu-offload-gb", "1.5"],
        ["--gpus", "2", "--hf-overrides", '{"a": 1}'],
    ):
        done = run(llama, "--gpu", "H100", *arguments)
        assert done.returncode == 0, done.stderr


def test_a_block_that_no_backend_takes_is_said(llama):
    assert "not a multiple of 16" in run(llama, "--gpu", "H100", "--block-size", "7").stdout


def test_an_unknown_architecture_is_refused_by_its_name(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLMs"]}')

    found = run(tmp_path, "--gpu", "H100")

    assert found.returncode == 2
    assert "LlamaForCausalLMs" in found.stderr
    assert "known classes with similar names: LlamaForCausalLM" in found.stderr


@each_row(
    ("text", "numbers"),
    [
        ("0.19.0", (0, 19, 0)),
        ("v0.19", (0, 19, 0)),
        ("0.32.0+cpu", (0, 32, 0)),
        ("0.10.1.1", (0, 10, 1, 1)),
        ("0.30.0rc1", (0, 30, 0)),
    ],
)
def test_releases_are_read_as_people_write_them(text, numbers):
    assert version(text) == numbers


@pytest.mark.parametrize("text", ["", "latest", "v", "1"])
def test_what_is_no_release_is_refused(text):
    with pytest.raises(FleetError, match="is not a vLLM release"):
        version(text)


def test_the_divisions_of_a_node_are_rows(llama):
    found = run(llama, "--gpu", "H100", "--gpus", "4")

    assert found.returncode == 0, found.stderr
    rows = [line.split() for line in found.stdout.splitlines() if line.strip()[:1].isdigit()]
    assert [row[:3] for row in rows] == [
        ["4", "1", "1"],
        ["2", "1", "2"],
        ["2", "2", "1"],
        ["1", "1", "4"],
        ["1", "2", "2"],
        ["1", "4", "1"],
    ]
    document = json.loads(run(llama, "--gpu", "H100", "--gpus", "4", "--json").stdout)
    assert [each["tensor_parallel_size"] for each in document["divisions"]] == [4, 2, 2, 1, 1, 1]

    refused = run(llama, "--gpu", "H100", "--gpus", "4", "-tp", "2")
    assert refused.returncode == 2
    assert "remove -tp, -pp and -dp" in refused.stderr


def test_a_share_of_a_gpu_is_judged_as_the_plan_does_and_the_least_that_fits_is_named(llama):
    def share(value, *more):
        options = ("--gpu", "H100", "--max-model-len", "8k", "--gpu-share", value, *more)
        return run(llama, *options)

    refused = share(0.1, "--json")
    assert refused.returncode == 1
    last = json.loads(refused.stdout)["reasons"][-1]
    least = float(last.removeprefix("the smallest --gpu-share that fits is "))
    assert share(least).returncode == 0
    assert share(round(least - 0.01, 2)).returncode == 1


@each_row(
    "options, says",
    [
        (("--gpu-share", "0.5", "-tp", "2"), "--tensor-parallel-size"),
        (("--gpu-share", "0.5", "--gpus", "8"), "--gpus"),
        (("--gpu-share", "0.97"), "can be at most 0.95"),
        (("--gpu-share", "0.5", "--gpu-memory-utilization", "0.4"), "--gpu-memory-utilization"),
    ],
)
def test_a_share_is_of_one_gpu(llama, options, says):
    refused = run(llama, "--gpu", "H100", *options)
    assert refused.returncode == 2
    assert says in refused.stderr


def test_an_encoder_has_no_cache_in_the_table(tmp_path):
    """The rest of the budget is of no use to it."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LARGE))
    shown = " ".join(run(file, "--gpu", "H100").stdout.split())

    assert "KV cache none the model has no KV cache; " in shown
    assert " remain unused, +/- " in shown
    assert "KV per token" not in shown
    assert "the remainder" not in shown


def test_an_option_without_its_switch_is_not_counted_and_that_is_said(llama):
    alone = run(llama, "--gpu", "H100", "--max-loras", "8", "--json")
    plain = run(llama, "--gpu", "H100", "--json")

    without = json.loads(plain.stdout)
    said = "`--max-loras` has no effect without `--enable-lora`: the estimate does not count it"
    assert json.loads(alone.stdout) == {**without, "reasons": [*without["reasons"], said]}
    together = run(llama, "--gpu", "H100", "--max-loras", "8", "--enable-lora", "--json")
    assert said not in json.loads(together.stdout)["reasons"]


def test_the_division_of_gpus_also_says_what_has_no_effect(llama):
    found = run(llama, "--gpu", "H100", "--gpus", "2", "--max-lora-rank", "64")

    assert "`--max-lora-rank` has no effect without `--enable-lora`" in found.stderr


def test_a_name_that_boards_of_other_memory_share_is_said(llama):
    said = "--gpu a100: this GPU is not A100-40GB: if you have A100-40GB, write that name"
    assert said in json.loads(run(llama, "--gpu", "a100", "--json").stdout)["reasons"]
    for sure in (("--gpu", "A100-40GB"), ("--gpu", "A100-80GB"), ("--gpu", "H100")):
        reasons = json.loads(run(llama, *sure, "--json").stdout)["reasons"]
        assert not any("write that if" in each for each in reasons)

"""`gpufleet size MODEL ...`: estimate a model's GPU memory. Contacts no node.

Thin: reads files, calls the library, prints. The options have the names of vLLM's flags.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from gpufleet.cli import completers
from gpufleet.cli.default_release import default_release
from gpufleet.cli.size_flags import judge_flags
from gpufleet.cli.strict_command import StrictCommand
from gpufleet.errors import FleetError
from gpufleet.formatting import join_names

if TYPE_CHECKING:
    from gpufleet.sizing.architectures.description import Description
    from gpufleet.sizing.options import Options, Sizing

GIB = 1 << 30

_MOST = 10**15
"""The maximum number of tokens or bytes: a thousand times the memory of a large node."""


class _Number(click.ParamType[int]):
    """
    A number in the syntax of vLLM's flags: 32768, 32k (units of 1000) or 32K (units of 1024).

    With `auto`, the words `auto` and -1 are also accepted.
    """

    name = "number"

    def __init__(self, *, auto: bool = False) -> None:
        self.auto = auto

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from gpufleet.flags.normalize import human_readable

        if isinstance(value, int):
            return value
        if self.auto and value in ("auto", "-1"):
            return -1
        number = human_readable(str(value))
        if number is None or number <= 0:
            also = ", or auto" if self.auto else ""
            self.fail(f"{value!r} is not a number above 0 (32768, 32k, 32K{also})", param, ctx)
        if number > _MOST:
            self.fail(f"{str(value)[:40]!r} is more memory than any node can have", param, ctx)
        return number


class _Object(click.ParamType[dict[str, Any]]):
    """A JSON object."""

    name = "json"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> dict[str, Any]:
        try:
            found = json.loads(value) if isinstance(value, str) else value
        except ValueError:
            found = None
        if not isinstance(found, dict):
            self.fail(f'{value!r} is not a JSON object, for example {{"key": 1}}', param, ctx)
        return found


_PARALLEL = click.IntRange(min=1)


@click.command(cls=StrictCommand)
@click.argument("model", required=False)
@click.option(
    "--gpu",
    metavar="NAME",
    shell_complete=completers.gpus,
    help="GPU model, for example H100 or L40S, or NVML's name of the GPU. `list` prints "
    "all models.",
)
@click.option(
    "--gpu-memory-gib",
    type=click.FloatRange(min=0, min_open=True),
    metavar="X",
    help="Total memory of a GPU in GiB, as CUDA reports it. With --device cpu: memory of the node.",
)
@click.option(
    "--vllm",
    metavar="VERSION",
    help="vLLM release, 0.8.0 or newer.  [default: the release of the project's lock, "
    "locks/vllm-VERSION.txt]",
)
@click.option(
    "--gpus",
    type=_PARALLEL,
    metavar="N",
    help="Print every way to divide the model over N GPUs of a node.",
)
@click.option(
    "--gpu-share",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    metavar="X",
    help="Fraction of one GPU that the model uses beside other models, as `gpu_share` in settings.",
)
@click.option("-tp", "--tensor-parallel-size", type=_PARALLEL, default=1, show_default=True)
@click.option("-pp", "--pipeline-parallel-size", type=_PARALLEL, default=1, show_default=True)
@click.option("-dp", "--data-parallel-size", type=_PARALLEL, default=1, show_default=True)
@click.option(
    "-dcp", "--decode-context-parallel-size", type=_PARALLEL, default=1, show_default=True
)
@click.option("-ep", "--enable-expert-parallel", is_flag=True)
@click.option(
    "--enable-eplb",
    is_flag=True,
    help="Balance the load of experts (only with expert parallelism).",
)
@click.option(
    "--eplb-config",
    type=_Object(),
    help="JSON, of which gpufleet uses only `num_redundant_experts`.",
)
@click.option(
    "--max-model-len",
    type=_Number(auto=True),
    help="Maximum number of tokens of a request, or auto.",
)
@click.option("--gpu-memory-utilization", type=click.FloatRange(0, 1, min_open=True))
@click.option(
    "--kv-cache-memory-bytes",
    type=_Number(),
    help="Size of the KV cache. It replaces the estimate.",
)
@click.option("--kv-cache-dtype", default="auto", show_default=True)
@click.option(
    "-q", "--quantization", help="Quantization method.  [default: the checkpoint's method]"
)
@click.option("--dtype", default="auto", show_default=True)
@click.option("--max-num-seqs", type=_PARALLEL)
@click.option("--max-num-batched-tokens", type=_Number())
@click.option("--block-size", type=_PARALLEL)
@click.option("--enforce-eager", is_flag=True)
@click.option("--enable-prefix-caching/--no-enable-prefix-caching", default=None)
@click.option("--disable-chunked-mm-input", is_flag=True)
@click.option("--disable-hybrid-kv-cache-manager", is_flag=True)
@click.option(
    "--num-speculative-tokens",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Number of speculative tokens, as in --speculative-config.",
)
@click.option(
    "--speculative-config",
    type=_Object(),
    help="JSON, as for vLLM's flag. `model` in it has the same form as MODEL.",
)
@click.option(
    "--hf-overrides",
    type=_Object(),
    help="JSON with values that override config.json, for example RoPE or the context length.",
)
@click.option("--runner", type=click.Choice(["auto", "generate", "pooling"]), default="auto")
@click.option("--convert", type=click.Choice(["auto", "none", "embed", "classify"]), default="auto")
@click.option(
    "--limit-mm-per-prompt",
    type=_Object(),
    help="Most pictures, videos and sounds in a prompt. If all numbers are 0, the part of "
    "the model for pictures or sound is not loaded.",
)
@click.option("--language-model-only", is_flag=True)
@click.option("--enable-lora", is_flag=True)
@click.option("--max-loras", type=_PARALLEL, default=1, show_default=True)
@click.option("--max-lora-rank", type=_PARALLEL, default=16, show_default=True)
@click.option("--fully-sharded-loras", is_flag=True)
@click.option(
    "--cpu-offload-gb",
    type=click.FloatRange(min=0),
    default=0,
    show_default=True,
    help="GiB of the weights of each GPU that stay in the memory of the host.",
)
@click.option(
    "--device",
    type=click.Choice(["cuda", "cpu"]),
    default="cuda",
    show_default=True,
    help="Device of the servers. cpu: the CPU build of vLLM.",
)
@click.option("--revision", help="Revision of a model on the Hub.")
@click.option("--hf-endpoint", metavar="URL", help="Address of the Hub.  [default: HF_ENDPOINT]")
@click.option("--hf-token-file", metavar="FILE", help="File with the token for the Hub.")
@click.option("--offline", is_flag=True, help="Use only files that are in the Hub's cache.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=1),
    default=60,
    show_default=True,
    help="Most seconds to wait for the Hub.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def size(model: str | None, *, as_json: bool, **given: Any) -> int:
    """
    Estimate a model's GPU memory, and whether vLLM starts.

    MODEL is a directory, a config.json, or a name on the Hugging Face Hub. The command downloads no
    weights. Its options have the names of vLLM's flags.

    \b
    gpufleet size meta-llama/Llama-3.1-8B --gpu L4 --max-model-len 16k
    gpufleet size /srv/models/qwen --gpu H100 -tp 2 --vllm 0.24.0 --json
    gpufleet size /srv/models/qwen --gpu H100 --gpus 8
    gpufleet size BAAI/bge-m3 --gpu H100 --gpu-share 0.1

    Exit status: 0: the model fits. 1: the model does not fit, it is too close to the limit to know,
    or a part of its memory cannot be estimated. 2: error.
    """
    if given["gpu"] == "list":
        _list_gpus()
        return 0
    if model is None:
        raise click.UsageError(
            "MODEL is missing: give a directory, a config.json, or a name on the Hub."
        )
    from gpufleet.sizing import checkpoint_reader, fit
    from gpufleet.sizing.architectures.description import describe
    from gpufleet.sizing.architectures.overrides import with_overrides
    from gpufleet.sizing.model_kinds import POOLS, read_kind
    from gpufleet.sizing.not_counted import BLOCK, odd_block

    options = _options(given)
    unread = judge_flags(given, ".".join(map(str, options.vllm)))
    if given["gpu_share"] is not None:
        _require_one_gpu(given)
        options = _with_share(options, given["gpu_share"])
    hub = checkpoint_reader.Hub(
        endpoint=given["hf_endpoint"], token_file=given["hf_token_file"], offline=given["offline"]
    )
    files = checkpoint_reader.read(
        model, revision=given["revision"], hub=hub, seconds=given["seconds"]
    )
    files = with_overrides(files, given["hf_overrides"] or {})
    kind = read_kind(files.config, files.modules).kind
    if given["runner"] == "auto" and given["convert"] in {None, "auto"}:
        options = replace(options, pooling=options.pooling or kind in POOLS)
    description = describe(files)
    if options.draft_model:
        try:
            read = checkpoint_reader.read(options.draft_model, hub=hub, seconds=given["seconds"])
            description = replace(description, draft=describe(read))
        except FleetError as error:
            description = replace(description, draft="; ".join(error.problems))
    if given["gpus"]:
        for note in unread:
            click.echo(f"note: {note}", err=True)
        return _divisions(files.origin, description, options, given["gpus"], as_json=as_json)
    found = fit.size(description, options)
    found = replace(found, notes=(*found.notes, *_other_cards(given), *unread))
    if given["gpu_share"] is not None and not found.fits:
        found = replace(found, remedy=_least_share(description, options))
    if options.device == "cuda" and options.block_size and options.block_size % BLOCK:
        odd = f"--block-size {options.block_size}: {odd_block(options.block_size)}"
        found = replace(found, notes=(*found.notes, odd))
    if as_json:
        document = {
            "model": files.origin,
            "architecture": description.architecture.name,
            "kind": kind,
            "parameters": description.architecture.parameters,
            **found.as_json(),
        }
        click.echo(json.dumps(document, indent=2))
    else:
        _print(files.origin, description, options, found, kind)
    return 0 if found.fits else 1


def _other_cards(given: Mapping[str, Any]) -> Iterator[str]:
    """Yield a remark if the given name may also mean GPUs with a different memory size."""
    from gpufleet.catalog.gpu_models import namesakes

    if given["gpu"] and not given["gpu_memory_gib"] and (others := namesakes(given["gpu"])):
        yield (
            f"--gpu {given['gpu']}: this GPU is not {join_names(others)}: if you have "
            f"{join_names(others)}, write that name"
        )


def _require_one_gpu(given: Mapping[str, Any]) -> None:
    """
    Raise `FleetError` for a share above the maximum, and for options that do not work with a share.
    """
    from gpufleet.settings.serving_settings import MOST_OF_A_GPU

    parallel = ("tensor", "pipeline", "data", "decode_context")
    divided = [f"--{each}-parallel-size".replace("_", "-") for each in parallel]
    names = [name for name in divided if given[name[2:].replace("-", "_")] > 1]
    names += ["--gpus"] if given["gpus"] else []
    names += ["--gpu-memory-utilization"] if given["gpu_memory_utilization"] is not None else []
    names += ["--device cpu"] if given["device"] == "cpu" else []
    if names:
        raise FleetError(
            f"--gpu-share and {join_names(names)} exclude each other, because a share is a "
            "part of one GPU and gpufleet computes --gpu-memory-utilization from it: "
            f"remove --gpu-share, or remove {join_names(names)}"
        )
    if given["gpu_share"] > MOST_OF_A_GPU:
        raise FleetError(
            f"--gpu-share {given['gpu_share']:g}: the sum of all shares of one GPU can be "
            f"at most {MOST_OF_A_GPU:g}"
        )


def _with_share(options: Options, share: float) -> Options:
    """Return the options of a server that gets this share of its GPU."""
    from gpufleet.planning.gpu_shares import utilization

    told = utilization(
        share, options.gpu_memory_gib, options.vllm, enforce_eager=options.enforce_eager
    )
    return replace(options, gpu_share=share, gpu_memory_utilization=told)


def _least_share(description: Description, options: Options) -> str:
    """Return a sentence with the smallest share with which the model fits, in hundredths."""
    from gpufleet.planning.gpu_shares import larger_shares
    from gpufleet.sizing import fit

    for share in larger_shares(options.gpu_share):
        if fit.size(description, _with_share(options, share)).fits:
            return f"the smallest --gpu-share that fits is {share:g}"
    return "no --gpu-share fits: to size the model for whole GPUs, remove --gpu-share"


def _divisions(
    origin: str, description: Description, options: Options, gpus: int, *, as_json: bool
) -> int:
    """
    Print a row for each way to divide the model over the GPUs.

    Returns 0 if the model fits in at least one of these ways, otherwise 1.
    """
    from gpufleet.console import add_row, display, new_table
    from gpufleet.sanitize import printable
    from gpufleet.sizing.divisions import divisions

    if (options.tensor_parallel, options.pipeline_parallel, options.data_parallel) != (1, 1, 1):
        raise FleetError("--gpus prints every way to divide the model: remove -tp, -pp and -dp")
    found = [*divisions(description, options, gpus)]
    if as_json:
        document = {"model": origin, "divisions": [each.as_json() for each in found]}
        click.echo(json.dumps(document, indent=2))
        return int(not any(each.sizing.fits for each in found))
    table = new_table("TP", "PP", "DP", "weights per GPU", "concurrent requests", "verdict")
    for each in found:
        sizing = each.sizing
        verdict = "fits" if sizing.fits else _VERDICTS[sizing.confidence]
        reason = "" if sizing.fits else f": {next(iter(sizing.reasons), '')}"
        add_row(
            table,
            str(each.tensor),
            str(each.pipeline),
            str(each.data),
            f"{sizing.weights_bytes_per_gpu / GIB:.2f} GiB",
            f"{each.at_once:.1f}",
            printable(verdict + reason),
        )
    display(table)
    return int(not any(each.sizing.fits for each in found))


# Kinds that are not printed: the most common kind, and the unknown kind.
_COMPLETES = ("generate", None)
_VERDICTS = {
    "certain": "does not fit",
    "near the edge": "near the edge",
    "unknown": "not known",
}


def _list_gpus() -> None:
    """Print the GPUs accepted by `--gpu`, with the total memory that CUDA reports."""
    from gpufleet.catalog.gpu_models import cards
    from gpufleet.console import add_row, display, new_table

    table = new_table("--gpu", "also", "GiB", "seen as")
    for one in cards():
        total = f"{one.memory_gib:.2f}"
        add_row(table, one.name, ", ".join((*one.aliases, *one.products)), total, one.source)
    display(table)


def version(text: str) -> tuple[int, ...]:
    """
    Return a release as numbers, without the suffix of a build.

    >>> version("v0.19.0+cu129")
    (0, 19, 0)
    """
    numbers = []
    for word in text.strip().removeprefix("v").partition("+")[0].split("."):
        digits = word[: len(word) - len(word.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
        if digits != word:  # 0rc1 is counted as 0
            break
    if len(numbers) < 2:
        raise FleetError(f"--vllm {text}: is not a vLLM release, such as {default_release()}")
    return (*numbers, 0) if len(numbers) == 2 else tuple(numbers)


def _options(given: dict[str, Any]) -> Options:
    from gpufleet.catalog.gpu_models import card
    from gpufleet.sizing.lora_memory import Lora
    from gpufleet.sizing.options import Options, is_pooling, modalities_off, video_frames

    speculative = given["speculative_config"] or {}
    tokens = speculative.get("num_speculative_tokens", given["num_speculative_tokens"])
    lora = Lora(
        given["max_loras"], given["max_lora_rank"], fully_sharded=given["fully_sharded_loras"]
    )
    memory, capability, product = given["gpu_memory_gib"], None, None
    if given["gpu"]:
        found = card(given["gpu"])
        memory = memory or found.memory_gib
        capability, product = found.compute_capability, found.products[0]
    if memory is None:
        if given["device"] == "cuda" or given["kv_cache_memory_bytes"] is None:
            raise FleetError(
                "you gave no GPU, so the memory of a GPU is unknown: add --gpu NAME, or "
                "--gpu-memory-gib X with the total memory that CUDA reports"
            )
        memory = given["kv_cache_memory_bytes"] / GIB
    return Options(
        gpu_memory_gib=memory,
        vllm=version(given["vllm"] or default_release()),
        tensor_parallel=given["tensor_parallel_size"],
        pipeline_parallel=given["pipeline_parallel_size"],
        data_parallel=given["data_parallel_size"],
        expert_parallel=given["enable_expert_parallel"],
        redundant_experts=_redundant_experts(given),
        decode_context_parallel=given["decode_context_parallel_size"],
        max_model_len=given["max_model_len"],
        gpu_memory_utilization=given["gpu_memory_utilization"],
        kv_cache_dtype=given["kv_cache_dtype"],
        quantization=given["quantization"],
        dtype=given["dtype"],
        max_num_seqs=given["max_num_seqs"],
        max_num_batched_tokens=given["max_num_batched_tokens"],
        kv_cache_memory_bytes=given["kv_cache_memory_bytes"],
        block_size=given["block_size"],
        enforce_eager=given["enforce_eager"],
        prefix_caching=given["enable_prefix_caching"],
        speculative_tokens=tokens if isinstance(tokens, int) else 0,
        speculative_method=_word(speculative.get("method")),
        draft_model=_word(speculative.get("model")),
        mixed_vocabularies=speculative.get("use_heterogeneous_vocab") is True,
        lora=lora if given["enable_lora"] else None,
        pooling=is_pooling(given["runner"], given["convert"]),
        language_model_only=given["language_model_only"],
        modalities_off=modalities_off(given["limit_mm_per_prompt"] or {}),
        video_frames=video_frames(given["limit_mm_per_prompt"] or {}),
        cpu_offload_gib=given["cpu_offload_gb"],
        chunked_media=not given["disable_chunked_mm_input"],
        hybrid_manager=not given["disable_hybrid_kv_cache_manager"],
        compute_capability=capability,
        device=given["device"],
        gpu=product,
    )


def _redundant_experts(given: Mapping[str, Any]) -> int | None:
    """Return the number of redundant experts for load balancing, or None if balancing is off."""
    copies = (given["eplb_config"] or {}).get("num_redundant_experts")
    if not given["enable_eplb"]:
        return None
    return copies if isinstance(copies, int) and not isinstance(copies, bool) else 0


def _word(value: Any) -> str | None:
    return value if isinstance(value, str) else None


# -- for people ------------------------------------------------------------------------------------


def _print(
    origin: str,
    description: Description,
    options: Options,
    found: Sizing,
    kind: str | None,
) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from gpufleet.sanitize import printable

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    for what, value, remark in _rows(options, found):
        table.add_row(Text(what), Text(value), Text(remark, style="dim"))
    console = Console(width=None if sys.stdout.isatty() else 1000, highlight=False)
    architecture = description.architecture
    billions = architecture.parameters / 1e9
    quantized = f", {description.quantization.method}" if description.quantization else ""
    release = ".".join(map(str, found.vllm))
    console.print(
        Text(printable(f"{origin}: {architecture.name}, {billions:.2f} billion parameters"))
        + Text(f"{quantized}{f', {kind}' if kind not in _COMPLETES else ''}; vLLM {release}")
    )
    console.print(table)
    verdict = "fits" if found.fits else "does not fit"
    style = "green" if found.fits else "bold red"
    if not found.fits and found.confidence != "certain":
        verdict, style = "close to the limit: vLLM may or may not start", "yellow"
    if found.confidence == "unknown":
        verdict, style = "unknown: a part of the model's memory cannot be estimated", "yellow"
    console.print(Text(verdict, style=style))
    for reason in found.as_json()["reasons"]:
        console.print(Text(printable(f"- {reason}")))


def _rows(options: Options, found: Sizing) -> Iterator[tuple[str, str, str]]:
    """Yield the rows of the table, as (quantity, number, remark)."""
    on_gpu = options.device == "cuda" and options.kv_cache_memory_bytes is None
    if on_gpu:
        share = found.gpu_memory_utilization
        total = options.gpu_memory_gib
        yield "usable memory per GPU", f"{share * total:.2f} GiB", f"{share:g} x {total:g} GiB"
    yield "weights", _gib(found.weights_bytes_per_gpu), "per GPU, largest rank"
    if on_gpu:
        yield (
            "activation peak",
            _gib(found.activation_bytes_per_gpu),
            f"estimate, at {found.max_num_batched_tokens:,} tokens and {found.max_num_seqs:,} "
            "sequences",
        )
        yield "CUDA and NCCL", _gib(found.non_torch_bytes_per_gpu), "estimate"
        where = (
            "estimate" if found.cuda_graphs_in_budget else "estimate; not part of the usable memory"
        )
        yield "CUDA graphs", _gib(found.cuda_graph_bytes_per_gpu), where
        error = found.estimate_error_bytes_per_gpu
        rest = _gib(found.kv_cache_bytes_per_gpu)
        if found.keeps_cache:
            yield "KV cache", rest, f"the remainder, +/- {_gib(error)}"
        else:
            unused = f"{rest} remain unused, +/- {_gib(error)}"
            yield "KV cache", "none", f"the model has no KV cache; {unused}"
    else:
        yield "KV cache", _gib(found.kv_cache_bytes_per_gpu), "as given"
    if found.keeps_cache:
        yield "KV cache tokens", f"{found.kv_cache_tokens:,}", "as vLLM logs at startup"
        token = found.kv_bytes_per_token_per_gpu
        yield "KV per token", f"{token:,} bytes", "per GPU"
        request = found.kv_bytes_for_max_model_len_per_gpu
        yield "KV per request", _gib(request), f"of {found.max_model_len:,} tokens, per GPU"
    length = "of that length" if found.keeps_cache else f"of {found.max_model_len:,} tokens"
    yield "concurrent requests", f"{found.max_concurrency:.2f}", length
    longest = found.largest_max_model_len
    yield "maximum context", f"{longest:,}" if longest else "none", "--max-model-len"
    if options.gpu_share != 1:
        return
    fewest = "more than 64" if found.smallest_gpus is None else str(found.smallest_gpus)
    yield "minimum GPUs", fewest, "of this model, for that context"


def _gib(count: int) -> str:
    return f"{count / GIB:.2f} GiB"

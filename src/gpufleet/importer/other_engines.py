"""Convert command lines of SGLang, TensorRT-LLM and TGI to arguments of `vllm serve`.  Pure.

gpufleet can run SGLang itself, so `as_launch` does not convert command lines of SGLang. `on_vllm`
converts them.

Contract: each option becomes the option of vLLM with the same meaning, or a note with the reason
(data/engines.yml). A note shows the values of known options only, and never a value that may be a
key.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from gpufleet import redact
from gpufleet.importer.server import Launch, Note

_DATA = Path(__file__).with_name("data") / "engines.yml"
VLLM_PORT = 8000
"""The default port of vLLM."""
_PLAIN = re.compile(r"[\w./:,+%-]{1,80}")
"""Matches values that a note may show."""
_NUMBER = re.compile(r"-\d+(\.\d+)?")
_SWITCH = re.compile(
    r"--(enable|disable|trust|skip|no)-|--(log-requests|is-embedding|json-output)$"
)
"""Matches options that have no value."""


@dataclass(frozen=True)
class Engine:
    """An engine whose command lines can be converted. The values come from data/engines.yml."""

    name: str
    port: int
    starts: re.Pattern[str]
    """Matches the commands and images that start the engine."""
    variables: tuple[str, ...]
    by_variables: bool
    renamed: Mapping[str, str]
    """vLLM's option for each option of the engine. Options with the same name are included."""
    computed: Mapping[str, str]
    dropped: Mapping[str, tuple[str, bool]]
    """For each dropped option, the reason, and whether the operator has to decide."""

    def has_option(self, option: str) -> bool:
        """Return whether gpufleet knows that the engine has this option."""
        return option in self.renamed or option in self.computed or option in self.dropped


@cache
def engines() -> Mapping[str, Engine]:
    """Return the engines by their keys: sglang, tensorrt-llm, tgi."""
    return {key: _engine(said) for key, said in yaml.safe_load(_DATA.read_text()).items()}


def _engine(said: Mapping[str, Any]) -> Engine:
    same = said["same"].split()
    return Engine(
        said["name"],
        said["port"],
        re.compile(said["starts"]),
        tuple(said.get("variables", ())),
        said.get("by_variables", False),
        {**dict(zip(same, same, strict=True)), **said["renamed"]},
        said["computed"],
        {
            option: (row["why"], row.get("decide", False))
            for row in said["dropped"]
            for option in row["options"].split()
        },
    )


def started_engine(text: str) -> Engine | None:
    """Return the engine that a command or an image starts, or None."""
    return next((each for each in engines().values() if each.starts.search(text)), None)


def find_engine(words: Sequence[str]) -> tuple[int, int, Engine] | None:
    """
    Return (index of the command, index of the first argument, engine), or None without such a
    command.
    """
    for at, word in enumerate(words):
        command = word.rpartition("/")[2]
        following = words[at + 1] if at + 1 < len(words) else ""
        if word == "-m" and following == "sglang.launch_server":
            return at, at + 2, engines()["sglang"]
        if command == "sglang" and following == "serve":
            return at, at + 2, engines()["sglang"]
        if command == "trtllm-serve":
            return at, at + (2 if following == "serve" else 1), engines()["tensorrt-llm"]
        if command == "text-generation-launcher":
            return at, at + 1, engines()["tgi"]
    return None


def as_launch(
    engine: Engine,
    name: str,
    words: Sequence[str],
    environment: Mapping[str, str],
    *,
    published: bool = False,
) -> Launch:
    """
    Return the server that an engine other than vLLM starts with these arguments.

    Arguments of SGLang are unchanged. Those of other engines are converted to vLLM's. `published`
    means that a container publishes the port for clients.
    """
    if engine is engines()["sglang"]:
        return Launch(name, tuple(words), environment, engine="sglang")
    argv, kept, notes = as_vllm(engine, words, environment, published=published)
    return Launch(name, argv, kept, notes=notes)


def on_vllm(launch: Launch) -> Launch:
    """Return the server that serves the same model with vLLM as a server of SGLang does now."""
    if launch.engine != "sglang":
        return launch
    argv, kept, notes = as_vllm(
        engines()["sglang"], launch.argv, launch.environment, published=launch.port is not None
    )
    return replace(
        launch, argv=argv, environment=kept, notes=(*launch.notes, *notes), engine="vllm"
    )


def as_vllm(
    engine: Engine, words: Sequence[str], environment: Mapping[str, str], *, published: bool = False
) -> tuple[tuple[str, ...], dict[str, str], tuple[Note, ...]]:
    """
    Convert the arguments and variables of an engine to those of vLLM. Return them with notes.

    `published` means that a container publishes the port for clients.
    """
    notes = [Note(f"this server runs {engine.name}: with these settings, vLLM serves the model")]
    given, stray = _options(words)
    kept: dict[str, str] = {}
    for name, value in environment.items():
        option = "--" + name.lower().replace("_", "-")
        if engine.by_variables and engine.has_option(option):
            given.setdefault(option, (value,) if value else ())
        elif engine.variables and name.startswith(engine.variables):
            notes.append(Note(f"{name} is dropped, because it is a variable of {engine.name}"))
        else:
            kept[name] = value
    model = stray.pop(0) if stray and "--model" not in engine.renamed.values() else None
    found: list[str] = [model] if model else []
    for option, values in given.items():
        for each in _translated(engine, Given(option, values, given)):
            if isinstance(each, Note):
                notes.append(each)
            else:
                found.append(each)
    if not (published or "--port" in given or "-p" in given or engine.port == VLLM_PORT):
        found += ("--port", str(engine.port))
        notes.append(Note(f"{engine.name} listens on port {engine.port} if no port is given"))
    notes += (
        Note(f"`{word}` belongs to no option, so it is dropped", decide=True) for word in stray
    )
    return tuple(found), kept, tuple(notes)


def _options(words: Sequence[str]) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """Return the options with their values in order, and the words that belong to no option."""
    found: dict[str, tuple[str, ...]] = {}
    stray: list[str] = []
    option = ""
    for word in words:
        if word.startswith("-") and not _NUMBER.fullmatch(word):
            name, equals, value = word.partition("=")
            option = name.lower().replace("_", "-")
            found[option] = (value,) if equals else ()
            if equals or _SWITCH.match(option):
                option = ""
        elif option:
            found[option] += (word,)
        else:
            stray.append(word)
    return found, stray


@dataclass(frozen=True)
class Given:
    """One option of a command line with its values. `line` has all options of the line by name."""

    option: str
    values: tuple[str, ...]
    line: Mapping[str, tuple[str, ...]]

    @property
    def text(self) -> str:
        """Return the values as one text."""
        return " ".join(self.values)

    def number(self, *names: str, otherwise: int | None = None) -> int | None:
        """
        Return the value of the first of these options that is given, or None if it is not a number.

        If none of the options is given, return `otherwise`.
        """
        for name in names:
            if (values := self.line.get(name)) is not None:
                return int(values[0]) if len(values) == 1 and values[0].isdigit() else None
        return otherwise

    def dropped(self, why: str, *, decide: bool = False) -> Note:
        """Return the note that reports that the option is dropped."""
        shown = all(_PLAIN.fullmatch(each) and not redact.is_secret(each) for each in self.values)
        hidden = redact.is_secret_name(self.option.lstrip("-"))
        text = f"{self.option} {self.text}".rstrip() if shown and not hidden else self.option
        return Note(f"`{text}` is dropped: {why}", decide=decide)


def _translated(engine: Engine, given: Given) -> Iterable[str | Note]:
    if (option := engine.renamed.get(given.option)) is not None:
        return (option, *given.values)
    if (function := engine.computed.get(given.option)) is not None:
        return _COMPUTED[function](given)
    if (dropped := engine.dropped.get(given.option)) is not None:
        why, decide = dropped
        return (given.dropped(why, decide=decide),)
    why = (
        "gpufleet does not know the corresponding option of vLLM: the documentation of "
        f"{engine.name} explains what this option does"
    )
    return (Note(f"`{given.option}` is dropped: {why}", decide=True),)


# -- computed options ------------------------------------------------------------------------------

_Words = Iterator[str | Note]
_IS_SO = "this is the behaviour without the option"
_READ = "vLLM reads from config.json how a checkpoint is quantized"

_TP = ("--tp-size", "--tensor-parallel-size", "--tp")
_DP = ("--dp-size", "--data-parallel-size", "--dp")
_ATTENTION_DP = ("--attn-dp-size", "--attention-data-parallel-size")
_DRAFT = ("--speculative-draft-model-path", "--speculative-draft-model")
_METHODS = {"EAGLE": "eagle", "EAGLE3": "eagle3", "NEXTN": "mtp", "NGRAM": "ngram"}

_TOOL_PARSERS = {
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v31",
    "deepseekv32": "deepseek_v32",
    "deepseekv4": "deepseek_v4",
    "deepseekv41": "deepseek_v41",
    "glm": "glm45",
    "gpt-oss": "openai",
    "hunyuan": "hunyuan_a13b",
    "interns1": "internlm",
    "llama3": "llama3_json",
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3": "hermes",
}
"""vLLM's names of tool parsers, if they differ from SGLang's in more than dashes."""
_REASONING_PARSERS = {
    "deepseek-r1": "deepseek_r1",
    "deepseek-v3": "deepseek_v3",
    "glm45": "glm45",
    "gpt-oss": "openai_gptoss",
    "kimi_k2": "kimi_k2",
    "minimax": "minimax_m2",
    "minimax-append-think": "minimax_m2_append_think",
    "mistral": "mistral",
    "qwen3": "qwen3",
    "qwen3-thinking": "qwen3",
    "step3": "step3",
}


def _tensor_parallel(given: Given) -> _Words:
    """
    Yield vLLM's tensor-parallel size. SGLang's size counts the GPUs of all attention groups
    together.
    """
    size = given.number(given.option)
    names = _DP if "--enable-dp-attention" in given.line else _ATTENTION_DP
    groups = given.number(*names, otherwise=1)
    if groups == 1 or size is None:
        yield from ("--tensor-parallel-size", *given.values)
    elif not groups or size % groups:
        yield given.dropped(
            "it is not a multiple of the number of attention groups: set `tensor_parallel` "
            "and `data_parallel` yourself",
            decide=True,
        )
    else:
        yield from ("--tensor-parallel-size", str(size // groups))
        yield Note(
            f"`{given.option} {size}` counts the GPUs of {groups} data-parallel groups: "
            f"`tensor_parallel` is {size // groups} here, `data_parallel` {groups}"
        )


def _attention_groups(given: Given) -> _Words:
    if given.number(*_DP, otherwise=1) == 1:
        yield from ("--data-parallel-size", *given.values)
    else:
        yield given.dropped(
            "the command line also sets copies of the whole model: set `data_parallel` yourself",
            decide=True,
        )


def _experts(given: Given) -> _Words:
    if given.values == ("1",):
        yield given.dropped(_IS_SO)
    else:
        yield "--enable-expert-parallel"


def _context(given: Given) -> _Words:
    """Yield the maximum context. SGLang writes 64Ki for the number that vLLM writes as 64K."""
    yield from ("--max-model-len", given.text.removesuffix("i"))


def _chunk(given: Given) -> _Words:
    if given.values == ("-1",):
        yield given.dropped("vLLM always divides long prompts")
    else:
        yield from ("--max-num-batched-tokens", *given.values)


def _block(given: Given) -> _Words:
    if given.values == ("1",):
        yield given.dropped("vLLM's blocks have 16 tokens or more")
    else:
        yield from ("--block-size", *given.values)


def _embedding(_: Given) -> _Words:
    yield from ("--runner", "pooling", "--convert", "embed")


def _chat_template(given: Given) -> _Words:
    if "/" in given.text or "{" in given.text or given.text.endswith((".jinja", ".json")):
        yield from ("--chat-template", *given.values)
    else:
        yield given.dropped(
            "it is a template of SGLang; vLLM uses the template of the model", decide=True
        )


def _cache_dtype(given: Given) -> _Words:
    names = {"bf16": "bfloat16", "fp8_e4m3fn": "fp8_e4m3"}
    yield from ("--kv-cache-dtype", *(names.get(each, each) for each in given.values))


def _implementation(given: Given) -> _Words:
    if given.values == ("sglang",):
        yield given.dropped("vLLM has its own")
    else:
        yield from ("--model-impl", *given.values)


def _sampling_defaults(given: Given) -> _Words:
    if given.values == ("openai",):
        yield from ("--generation-config", "vllm")
    else:
        yield given.dropped(_IS_SO)


def _quantization(given: Given) -> _Words:
    if given.text in {"w8a8_fp8", "w8a8_int8", "blockwise_int8", "qoq"}:
        yield given.dropped(_READ, decide=True)
    else:
        yield from ("--quantization", "modelopt" if given.text == "modelopt_fp8" else given.text)


def _quantize(given: Given) -> _Words:
    if given.text.startswith("bitsandbytes"):
        yield from ("--quantization", "bitsandbytes")
    elif given.text == "fp8":
        yield from ("--quantization", "fp8")
    elif given.text in {"awq", "gptq", "marlin", "compressed-tensors"}:
        yield given.dropped(_READ)
    else:
        yield given.dropped("vLLM has no such method: choose a different checkpoint", decide=True)


def _speculation(given: Given) -> _Words:
    """
    Yield vLLM's settings for speculative decoding. SGLang's steps become the number of draft
    tokens.
    """
    tokens = given.number("--speculative-num-steps")
    draft = next((given.line[name] for name in _DRAFT if given.line.get(name)), ())
    method = _METHODS.get(given.text.upper())
    if method == "eagle" and not draft:
        method = "mtp"  # the model's own layers draft the tokens
    if tokens is None or (method is None and not draft):
        yield given.dropped("set `flags.speculative-config`", decide=True)
        return
    config: dict[str, str | int] = {"method": method} if method else {}
    config |= {"model": draft[0]} if draft else {}
    yield from ("--speculative-config", json.dumps({**config, "num_speculative_tokens": tokens}))


def _tool_parser(given: Given) -> _Words:
    name = _TOOL_PARSERS.get(given.text, given.text.replace("-", "_"))
    yield from ("--enable-auto-tool-choice", "--tool-call-parser", name)


def _reasoning_parser(given: Given) -> _Words:
    if (name := _REASONING_PARSERS.get(given.text)) is None:
        yield given.dropped("set `flags.reasoning-parser` to vLLM's parser", decide=True)
    else:
        yield from ("--reasoning-parser", name)


def _adapters(given: Given) -> _Words:
    if "--enable-lora" not in given.line:
        yield "--enable-lora"
    yield from ("--lora-modules", *map(_module, given.values))


def _listed_adapters(given: Given) -> _Words:
    names = (one for each in given.values for one in each.split(",") if one)
    yield from ("--enable-lora", "--lora-modules", *map(_module, names))
    yield Note(
        "in vLLM, clients write the name of an adapter as `model`, not as `adapter_id` as in TGI",
        decide=True,
    )


def _module(text: str) -> str:
    """Return an adapter in the form that vLLM requires, `name=path`."""
    if text.startswith("{"):
        try:
            said = json.loads(text)
            return f"{said['lora_name']}={said['lora_path']}"
        except (ValueError, KeyError, TypeError, RecursionError):
            return text
    return text if "=" in text else f"{text}={text}"


def _graphs(given: Given) -> _Words:
    if given.values == ("0",):
        yield "--enforce-eager"
    else:
        sizes = (size for each in given.values for size in each.split(",") if size)
        yield from ("--cudagraph-capture-sizes", *sizes)


def _origins(given: Given) -> _Words:
    yield from ("--allowed-origins", json.dumps(given.values))


def _backend(given: Given) -> _Words:
    if given.text in {"tensorrt", "trt"}:
        yield given.dropped(
            "vLLM cannot load a built engine: write the checkpoint as `model`", decide=True
        )
    else:
        yield given.dropped("vLLM loads the checkpoint itself")


_COMPUTED: Mapping[str, Callable[[Given], _Words]] = {
    "adapters": _adapters,
    "attention_groups": _attention_groups,
    "backend": _backend,
    "block": _block,
    "cache_dtype": _cache_dtype,
    "chat_template": _chat_template,
    "chunk": _chunk,
    "context": _context,
    "embedding": _embedding,
    "experts": _experts,
    "graphs": _graphs,
    "implementation": _implementation,
    "listed_adapters": _listed_adapters,
    "origins": _origins,
    "quantization": _quantization,
    "quantize": _quantize,
    "reasoning_parser": _reasoning_parser,
    "sampling_defaults": _sampling_defaults,
    "speculation": _speculation,
    "tensor_parallel": _tensor_parallel,
    "tool_parser": _tool_parser,
}
"""The functions that convert options, by their names in data/engines.yml."""

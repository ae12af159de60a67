"""
Convert a server's environment variables to settings or flags. Pure.

If a variable cannot be converted, a note gives the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from gpufleet import redact
from gpufleet.flags.environment import environment_problems
from gpufleet.flags.problem import Problem, Severity
from gpufleet.importer.findings import UNSET, Findings
from gpufleet.importer.flag_rules import FlagRules
from gpufleet.importer.flag_settings import is_open
from gpufleet.importer.moe_variables import MOE_VARIABLES, moe_choice
from gpufleet.importer.secret_arguments import read_json
from gpufleet.settings import engine_flags

_SECRETS = {
    "VLLM_API_KEY": "api_key_file",
    "HF_TOKEN": "hf_token_file",
    "HUGGING_FACE_HUB_TOKEN": "hf_token_file",
}

_OWN_GPUS = "the plan decides which GPUs a stage gets"
_OWN_DIRECTORIES = "each server has its own directories"
_DROPPED = {
    "CUDA_VISIBLE_DEVICES": _OWN_GPUS,
    "NVIDIA_VISIBLE_DEVICES": _OWN_GPUS,
    "NVIDIA_DRIVER_CAPABILITIES": "only NVIDIA's container runtime reads it",
    "CUDA_DEVICE_ORDER": _OWN_GPUS,
    "PATH": "the programs of the release must be found first",
    "LD_LIBRARY_PATH": "other libraries would be found before the libraries of the release",
    "PYTHONPATH": "other packages would be found before the packages of the release",
    "VIRTUAL_ENV": "the release has its own environment",
    "HF_HUB_OFFLINE": "a deploy copies files before a start, which then needs no Hub",
    "HF_HUB_ENABLE_HF_TRANSFER": "files are staged before a start",
    "VLLM_HOST_IP": "each node has its own value, which the plan sets",
    "VLLM_PORT": "the plan sets the ports",
} | dict.fromkeys(
    (
        "HOME",
        "HF_HOME",
        "HF_HUB_CACHE",
        "HUGGINGFACE_HUB_CACHE",
        "TRANSFORMERS_CACHE",
        "XDG_CACHE_HOME",
        "VLLM_CACHE_ROOT",
        "VLLM_CONFIG_ROOT",
        "TRITON_CACHE_DIR",
        "TORCHINDUCTOR_CACHE_DIR",
        "FLASHINFER_WORKSPACE_BASE",
        "CUDA_CACHE_PATH",
        "TMPDIR",
    ),
    _OWN_DIRECTORIES,
)


def take_variables(
    variables: Mapping[str, str],
    rules: FlagRules,
    quantization: str | None,
    found: Findings,
    secrets: Set[str] = frozenset(),
) -> tuple[dict[str, str], tuple[str, ...]]:
    """
    Return the variables to keep, and the flags that replace other variables.

    `secrets` has the names of variables whose values are secrets that are not in the text.
    """
    kept = _kept(variables, rules, found, secrets)
    if rules.engine != "vllm":  # gpufleet does not know the variables of its releases
        return kept, ()
    added: list[str] = []
    given = dict(kept)
    for problem in environment_problems(rules.schema, given):
        name = problem.argument.partition("=")[0]
        if problem.severity is Severity.WARN:
            found.say(f"{problem.argument} is kept: {problem.found}")
            continue
        kept.pop(name, None)
        if name in MOE_VARIABLES:
            choice = moe_choice(name, given, quantization)
            added += choice.arguments
            now = (
                f"; it is rewritten to `{' '.join(choice.arguments)}`"
                if choice.arguments
                else "; dropped"
            )
            found.say(f"{problem.argument}: {choice.why}{now}", decide=choice.decide)
            continue
        added += problem.rewritten or ()
        found.say(f"{problem.argument}: {problem.found}; {_fate(problem)}", decide=is_open(problem))
    return kept, tuple(added)


def _kept(
    variables: Mapping[str, str], rules: FlagRules, found: Findings, secrets: Set[str]
) -> dict[str, str]:
    """Return the variables that are neither secrets nor set by gpufleet."""
    kept: dict[str, str] = {}
    for name, value in variables.items():
        if rules.engine != "vllm" and name.startswith("VLLM_"):
            found.say(f"{name} is dropped, because it is a variable of vLLM")
        elif name in _SECRETS:
            found.drop_secret(name, value, _SECRETS[name])
        elif (
            name in secrets
            or redact.is_secret_name(name)
            or redact.is_secret(value)
            or any(redact.find_secrets(read_json(value)))
        ):
            for inner in redact.find_secrets(read_json(value)):
                found.hide(inner)
            found.drop_secret_variable(name, value)
        elif why := engine_flags.of(rules.engine).refused_variables.get(name):
            found.say(f"{name}={value} is dropped: {why}")
        elif name in _DROPPED:
            found.say(f"{name}={value} is dropped: {_DROPPED[name]}")
        elif name == "HF_ENDPOINT":
            found.shared["hf_endpoint"] = value
            found.say(
                f"gpufleet writes HF_ENDPOINT={value} as the setting {found.section}.hf_endpoint"
            )
        else:
            kept[name] = value
            if UNSET.search(value):
                found.say(f"{name} refers to `{value}`: write the value itself", decide=True)
    return kept


def _fate(problem: Problem) -> str:
    if problem.rewritten:
        return f"it is rewritten to `{' '.join(problem.rewritten)}`"
    return f"use instead: {problem.replacement}" if problem.replacement else "dropped"

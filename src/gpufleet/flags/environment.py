"""Validate environment variables for the release that will read them.  Pure.

Contract: this module checks vLLM's variables (VLLM_*, and all others in the release's own table),
and the values of a few variables that libraries read (`_WORDS`). A VLLM_* variable that the release
does not read is refused, because the operator expects an effect, but the variable has none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping

from gpufleet.flags import changes
from gpufleet.flags.changes import Change, ChangeKind
from gpufleet.flags.problem import JudgedBy, Kind, Problem, Severity
from gpufleet.flags.schema import Schema, Variable

_PREFIX = "VLLM_"

# The words that vLLM's table recognises for a switch. vLLM reads other words as off.
_SWITCHES = {"", "0", "1", "true", "false"}

# How envs.py of vLLM converts the text of a variable, by `Variable.form`, and the name of the form
# in messages.
_FORMS: Mapping[str, tuple[Callable[[str], object], str]] = {
    "integer": (int, "a whole number"),
    "number": (float, "a number"),
    "json": (json.loads, "JSON"),
}


# The accepted values of some variables, and what happens with other values. Sources: NCCL:
# src/debug.cc, ncclDebugInit, and src/misc/param.cc, ncclLoadParam. OpenMP: libgomp/env.c. vLLM's
# log level: logging.config.dictConfig of Python. PyTorch 2.4 to 2.11:
# c10/cuda/CUDAAllocatorConfig.cpp.
_NUMBER = (
    re.compile(r"\s*[-+]?(0[xX][0-9a-fA-F]+|\d+)\s*"),
    Severity.WARN,
    "is not a number, so NCCL ignores it and uses its default: write 1, 0 or a different number",
)
_ALLOCATOR = (
    re.compile(
        r"\s*|(\s*(backend|expandable_segments|garbage_collection_threshold|max_split_size_mb"
        r"|graph_capture_record_stream_reuse|large_segment_size_mb|max_non_split_rounding_mb"
        r"|per_process_memory_fraction|pinned_\w+|release_lock_on_(cuda|hip|device_)malloc"
        r"|roundup_power2_divisions|throw_on_cudamalloc_oom|use_\w+)\s*:[^:].*)",
        re.DOTALL,
    ),
    Severity.WARN,
    "does not begin with an option of PyTorch's allocator, for example expandable_segments:True. "
    "A server does not start with an option that its version of PyTorch does not know",
)
_WORDS: Mapping[str, tuple[re.Pattern[str], Severity, str]] = {
    "PYTORCH_CUDA_ALLOC_CONF": _ALLOCATOR,
    "PYTORCH_ALLOC_CONF": _ALLOCATOR,
    **dict.fromkeys(
        (
            "NCCL_BUFFSIZE",
            "NCCL_CUMEM_ENABLE",
            "NCCL_IB_DISABLE",
            "NCCL_IB_GID_INDEX",
            "NCCL_IB_TC",
            "NCCL_IB_TIMEOUT",
            "NCCL_MAX_NCHANNELS",
            "NCCL_MIN_NCHANNELS",
            "NCCL_NVLS_ENABLE",
            "NCCL_P2P_DISABLE",
            "NCCL_SHM_DISABLE",
        ),
        _NUMBER,
    ),
    "NCCL_DEBUG": (
        re.compile("NONE|VERSION|WARN|INFO|ABORT|TRACE", re.IGNORECASE),
        Severity.WARN,
        "is not a log level of NCCL (VERSION, WARN, INFO, TRACE), so NCCL logs nothing",
    ),
    "OMP_NUM_THREADS": (
        re.compile(r"\s*[1-9]\d*(\s*,\s*[1-9]\d*)*\s*"),
        Severity.WARN,
        "is not a number of threads, so OpenMP ignores the variable",
    ),
    "VLLM_LOGGING_LEVEL": (
        re.compile("CRITICAL|FATAL|ERROR|WARN|WARNING|INFO|DEBUG|NOTSET", re.IGNORECASE),
        Severity.REFUSE,
        "is not a Python log level (DEBUG, INFO, WARNING, ERROR, CRITICAL), so vLLM ends with an "
        "error when it sets up its log",
    ),
}


def environment_problems(
    schema: Schema, environment: Mapping[str, str], *, fatal: bool = False
) -> Iterator[Problem]:
    """
    Yield the mistakes in a server's environment variables.

    `fatal` states whether --fail-on-environ-validation is given. vLLM itself then refuses unknown
    variables.
    """
    for name, value in environment.items():
        known = schema.environment.get(name)
        if name in _WORDS and not (
            name == "VLLM_LOGGING_LEVEL" and environment.get("VLLM_CONFIGURE_LOGGING") == "0"
        ):
            yield from _of_words(name, value)
        if known is not None:
            yield from _of_known(schema, known, value)
        elif name.upper() != name and name.upper().startswith(_CAPITALS):
            yield _in_small_letters(name, value)
        elif name.startswith(_PREFIX) and not _is_read_beside(schema, name):
            yield _of_unknown(schema, name, value, JudgedBy.START if fatal else JudgedBy.ADVICE)


_CAPITALS = (_PREFIX, "NCCL_", "CUDA_", "HF_", "OMP_", "PYTORCH_", "TORCH_")
"""Prefixes of variables that programs read only in capital letters."""


def _in_small_letters(name: str, value: str) -> Problem:
    return Problem(
        Kind.ENVIRONMENT,
        Severity.WARN,
        JudgedBy.ADVICE,
        f"{name}={value}",
        f"no program reads {name}: names of variables are case-sensitive",
        replacement=name.upper(),
    )


def _of_words(name: str, value: str) -> Iterator[Problem]:
    right, severity, what = _WORDS[name]
    if not right.fullmatch(value):
        by = JudgedBy.START if severity is Severity.REFUSE else JudgedBy.ADVICE
        yield Problem(Kind.ENVIRONMENT, severity, by, f"{name}={value}", f"`{value}` {what}")


def _is_read_beside(schema: Schema, name: str) -> bool:
    return any(name in variable.also for variable in schema.environment.values())


def _of_unknown(schema: Schema, name: str, value: str, by: JudgedBy) -> Problem:
    gone = changes.removal_reason(name, schema.version)
    written = f"{name}={value}"
    if gone is not None:
        return _gone(gone, written, value, by)
    from difflib import get_close_matches  # seldom needed, and slow to load

    near = get_close_matches(name, schema.environment, n=2, cutoff=0.8)
    return Problem(
        Kind.ENVIRONMENT,
        Severity.REFUSE,
        by,
        written,
        f"vLLM {schema.version} does not read {name}, so the variable has no effect",
        replacement=" or ".join(near) or None,
    )


def _gone(gone: Change, written: str, value: str, by: JudgedBy) -> Problem:
    if gone.kind is ChangeKind.NEVER:
        what = "no release of vLLM reads this variable, so it has no effect"
    else:
        what = f"vLLM no longer reads this variable, so it has no effect: {gone.why}"
    return Problem(
        Kind.ENVIRONMENT,
        Severity.REFUSE,
        by,
        written,
        what,
        since=gone.since,
        replacement=gone.replacement or gone.then,
        rewritten=gone.rewritten_arguments((value,)),
    )


def _of_known(schema: Schema, known: Variable, value: str) -> Iterator[Problem]:
    written = f"{known.name}={value}"
    if fault := _fault(known, value):
        yield Problem(Kind.ENVIRONMENT, Severity.REFUSE, JudgedBy.START, written, fault)
    elif known.form is None and _is_switch(known) and value.strip().lower() not in _SWITCHES:
        yield Problem(
            Kind.ENVIRONMENT,
            Severity.WARN,
            JudgedBy.ADVICE,
            written,
            f"`{value}` is neither 1 nor 0, and vLLM may read it as 0 (off): write 1 or 0",
        )
    for change in changes.changes_of(known.name):
        if change.kind is ChangeKind.MEANING and change.is_in_force(schema.version):
            yield Problem(
                Kind.MEANING,
                Severity.WARN,
                JudgedBy.ADVICE,
                written,
                change.why + (f" (if {change.when})" if change.when else ""),
                since=change.since,
                replacement=change.replacement,
            )


def _is_switch(known: Variable) -> bool:
    return (known.type or "").split(" ")[0] == "bool"


def _fault(known: Variable, value: str) -> str | None:
    """Return the error with which vLLM ends when it reads this value, or None if it accepts it."""
    if known.choices is not None and value:
        given = value.lower() if known.ignore_case else value
        choices = [choice.lower() if known.ignore_case else choice for choice in known.choices]
        several = (known.type or "").startswith(("list", "set"))
        parts = given.split(",") if several else [given]
        if any(part.strip() not in choices for part in parts):
            return f"`{value}` is not an accepted value: write one of {', '.join(known.choices)}"
    if known.form is not None:
        read, what = _FORMS[known.form]
        try:
            read(value)
        except (ValueError, RecursionError):
            return f"`{value}` is not {what}, so vLLM ends with an error when it reads the variable"
    return None

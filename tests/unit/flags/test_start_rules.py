"""Each rule of the start refuses in its releases, and in none before and after.

Writes docs/measured/flag-start-rules.md: a line that breaks the rule, in the release before its
first, in its first, in its last and in the one after. A release without the flag is `-`.
"""

from __future__ import annotations

import shlex

from gpufleet.flags import schema
from gpufleet.flags.check import check
from gpufleet.flags.conflict_rule import Conflict
from gpufleet.flags.conflicts import RULES
from gpufleet.flags.problem import Problem
from gpufleet.flags.schema import Limits, Schema, sort_key
from tests.support import measured
from tests.support.checkout import ROOT
from tests.support.rows import each_row

PAGE = "measured/flag-start-rules.md"
VERSIONS = schema.versions()

# A line for each rule, in the order of the rules; words before `M` are variables.
BREAKS = (
    """
M --headless --api-server-count 1
M --headless --api-server-count 2
M --headless --data-parallel-hybrid-lb
M -dp 2 --data-parallel-rank 0 --data-parallel-hybrid-lb --data-parallel-size-local 1
M -dp 2 --data-parallel-external-lb --data-parallel-hybrid-lb --data-parallel-size-local 1
M --data-parallel-multi-port-external-lb
M --data-parallel-multi-port-external-lb -dp 2
M --data-parallel-multi-port-external-lb -dp 2 --data-parallel-size-local 2 --api-server-count 2
M --data-parallel-multi-port-external-lb -dp 2 --data-parallel-size-local 2 --uds /run/x
M --nnodes 2 -tp 2 --data-parallel-backend ray
M --nnodes 2 -tp 3
M --nnodes 2 -tp 2 --node-rank 2
M --nnodes 2 -tp 2 --distributed-executor-backend ray
M -dp 2 --data-parallel-hybrid-lb
M -dp 2 --data-parallel-external-lb
M -dp 2 --data-parallel-rank 0 --data-parallel-size-local 2
M --data-parallel-rank 0
M -dp 2 --data-parallel-rank 2
M -dp 2 --data-parallel-size-local 3
M --enable-fault-tolerance
M -dp 2 --data-parallel-rank 0 --enable-fault-tolerance --api-server-count 2
M -tp 2 --enable-eplb
M --enable-eplb --enable-expert-parallel
M --eplb-config {"num_redundant_experts":2}
M --enable-elastic-ep
M --enable-elastic-ep --enable-eplb --enable-expert-parallel -tp 2 -pp 2
M --enable-elastic-ep --enable-eplb --enable-expert-parallel -tp 2 -dp 2 --data-parallel-rank 0
M --enable-elastic-ep --enable-eplb --enable-expert-parallel -dp 2 --data-parallel-hybrid-lb
M --enable-elastic-ep --enable-eplb --enable-expert-parallel -dp 4 --elastic-ep-max-dp-size 2
M -tp 4 --decode-context-parallel-size 3
M --dcp-comm-backend a2a
M --numa-bind-nodes 0
M --ray-workers-use-nsight --distributed-executor-backend mp
M -pp 2 --distributed-executor-backend uni
M --enable-dbo --all2all-backend naive
VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 M --api-server-count 2
M --headless --data-parallel-size-local 0
M --numa-bind --numa-bind-cpus 3-1
M --numa-bind --numa-bind-nodes -1
M --distributed-executor-backend slurm
M --max-model-len 0
M --speculative-config {"method":"ngram"}
M --async-scheduling --speculative-config {"method":"medusa","model":"d","num_speculative_tokens":2}
M --async-scheduling --speculative-config {"method":"eagle","disable_padded_drafter_batch":true}
M --attention-backend FLASHINFER --attention-config {"backend":"FLASHINFER"}
M --cudagraph-capture-sizes 1 --compilation-config {"cudagraph_capture_sizes":[1]}
M --max-cudagraph-capture-size 8 --compilation-config {"max_cudagraph_capture_size":8}
M --spec-method ngram --speculative-config {"method":"ngram","num_speculative_tokens":2}
M --spec-model d --speculative-config {"model":"d","num_speculative_tokens":2}
M --spec-tokens 2 --speculative-config {"method":"ngram","num_speculative_tokens":2}
M --per-request-spec-decode-metrics summary
M --max-num-seqs 256 --max-num-batched-tokens 128
M --no-enable-chunked-prefill --max-num-batched-tokens 1024 --max-model-len 2048
M --max-num-seqs 2 --max-num-active-seqs 3
M --long-prefill-token-threshold 4096 --max-model-len 2048
VLLM_USE_V1=1 M --max-num-partial-prefills 2
M --max-num-partial-prefills 2
M --enable-lora --max-loras 4 --max-cpu-loras 2
M --lora-modules a=/b
M --collect-detailed-traces all
M --gpu-memory-utilization 1.5
M --enable-lora --max-loras 0
M --speculative-config {"method":"ngram","prompt_lookup_min":5,"prompt_lookup_max":2}
M -tp 4 --speculative-config {"model":"m","draft_tensor_parallel_size":2}
M --speculative-config {"method":"suffix","suffix_decoding_max_tree_depth":0}
M --enable-lora --max-num-seqs 9 --max-num-batched-tokens 17 --speculative-config {SPEC}
M --offload-group-size 2 --offload-num-in-group 3
M --offload-group-size 2 --offload-prefetch-step 0
M --mm-shm-cache-max-object-size-mb 64
M --mm-encoder-attn-backend XFORMERS
M --enable-flashinfer-autotune --kernel-config {"enable_flashinfer_autotune":true}
PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True M --kv-transfer-config {KV}
M --speculative-config {"method":"eagle3","num_speculative_tokens":3}
M --limit-mm-per-prompt {"image":-1}
M --logits-processors my.module.Class
M --seed -1
M --kv-transfer-config {"kv_connector":"NixlConector","kv_role":"kv_both"}
M --show-hidden-metrics-for-version abc
M --compilation-config {"cudagraph_capture_sizes":[]}
M --max-cudagraph-capture-size -1
M --worker-cls nope
M --optimization-level 4
M --enable-auto-tool-choice
M --enable-log-outputs
M --sse-keep-alive-interval -1
M --enable-per-request-metrics --disable-log-stats
M --grpc-port 5000
VLLM_USE_RUST_FRONTEND=1 M --grpc-port 5000 --grpc
VLLM_USE_RUST_FRONTEND=1 M --grpc-port 8000 --port 8000
M --middleware auth
M --port 70000
M --host http://0.0.0.0
""".replace("{SPEC}", '{"model":"m","num_speculative_tokens":1}')
    .replace("{KV}", '{"kv_connector":"NixlConnector","kv_role":"kv_both"}')
    .strip()
    .splitlines()
)

assert len(BREAKS) == len(RULES), (len(BREAKS), len(RULES))


def _problems(version: str, written: str) -> tuple[Problem, ...]:
    words = shlex.split(written.replace('"', '\\"'))
    at = words.index("M")
    return check(schema.load(version), words[at:], dict(word.split("=", 1) for word in words[:at]))


def _around(first: str, last: str) -> dict[str, str | None]:
    """Return the releases before, in and after a range; None: there is no such release."""
    start, end = VERSIONS.index(first), VERSIONS.index(last)
    return {
        "before": VERSIONS[start - 1] if start else None,
        "first": first,
        "last": last,
        "after": VERSIONS[end + 1] if end + 1 < len(VERSIONS) else None,
    }


def _said(version: str | None, written: str, sentence: str, flags: tuple[str, ...]) -> str:
    """Return what a release answers: refused, taken, or - where it lacks one of the flags."""
    if version is None:
        return "-"
    if any(problem.found == sentence for problem in _problems(version, written)):
        return f"{version} refuses"
    named = [flag for flag in flags if flag in written]
    lacking = any(schema.load(version).flag(flag) is None for flag in named)
    return f"{version} has it not" if lacking else f"{version} takes it"


def _last(rule: Conflict) -> str:
    if rule.until is None:
        return VERSIONS[-1]
    return VERSIONS[VERSIONS.index(rule.until) - 1]


@each_row(
    ("rule", "written"),
    list(zip(RULES, BREAKS, strict=True)),
    ids=[f"{rule.since} {written}" for rule, written in zip(RULES, BREAKS, strict=True)],
)
def test_a_rule_refuses_in_its_releases_and_in_no_other(rule: Conflict, written: str) -> None:
    has = [v for v in VERSIONS if all(_flags_of(schema.load(v), written))]
    inside = [v for v in has if sort_key(rule.since) <= sort_key(v) <= sort_key(_last(rule))]
    assert inside
    around = _around(inside[0], inside[-1])
    said = {
        name: _said(version, written, rule.sentence, rule.flags) for name, version in around.items()
    }
    assert said["first"].endswith("refuses")
    assert said["last"].endswith("refuses")
    assert not said["before"].endswith("refuses")
    assert not said["after"].endswith("refuses")
    measured.note(PAGE, f"`{written}`", rule.where, *said.values(), key=2)


def _flags_of(release: Schema, written: str) -> list[bool]:
    words = written.partition("M ")[2].split()
    return [
        release.flag(word) is not None
        for word in words
        if word.startswith("-") and not word[1:].isdigit()
    ]


def _limited() -> list[tuple[str, Limits, str, str]]:
    """Return each limit of each flag with the first and the last release that has it."""
    found: list[tuple[str, Limits, str, str]] = []
    spans: dict[tuple[str, str], list[str]] = {}
    limits: dict[tuple[str, str], Limits] = {}
    for version in VERSIONS:
        for flag in schema.load(version).flags:
            if flag.limits is not None:
                key = (flag.name, repr((flag.limits.constraints, flag.limits.needs)))
                spans.setdefault(key, []).append(version)
                limits[key] = flag.limits
    for key, versions in spans.items():
        found.append((key[0], limits[key], versions[0], versions[-1]))
    return found


def _outside(limits: Limits) -> str:
    """Return a value that breaks a limit by as little as can be."""
    bounds = limits.constraints
    if limits.type:
        return "nope"
    if "ge" in bounds:
        return str(int(bounds["ge"]) - 1)
    return str(int(bounds["gt"]))


@each_row(("name", "limits", "first", "last"), _limited())
def test_a_limit_refuses_in_its_releases_and_in_no_other(
    name: str, limits: Limits, first: str, last: str
) -> None:
    switch = f" --{limits.needs.replace('_', '-')}" if limits.needs else ""
    written = f"M{switch} {name} {_outside(limits)}"
    said = {}
    for where, version in _around(first, last).items():
        flag = schema.load(version).flag(name) if version else None
        if version is None or flag is None:
            said[where] = f"{version} has it not" if version else "-"
            continue
        same = flag.limits is not None and flag.limits.constraints == limits.constraints
        broken = same and any(
            problem.refuses and name in problem.argument for problem in _problems(version, written)
        )
        said[where] = f"{version} {'refuses' if broken else 'has no such limit'}"
    assert said["first"].endswith("refuses")
    assert said["last"].endswith("refuses")
    assert not said["before"].endswith("refuses")
    assert not said["after"].endswith("refuses")
    measured.note(PAGE, f"`{written}`", f"{limits.owner}, the field", *said.values(), key=2)


def test_the_page_has_a_row_for_each_rule() -> None:
    rows = [line for line in (ROOT / "docs" / PAGE).read_text().splitlines() if line[:3] == "| `"]
    assert len(rows) >= len(RULES) + len(_limited())
    text = "\n".join(rows)
    missing = [line for line in BREAKS if f"`{line.replace('|', ':')}`" not in text]
    assert missing == []

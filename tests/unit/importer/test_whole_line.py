"""A command line is judged whole, and what it says of nodes and of LiteLLM becomes settings."""

from __future__ import annotations

from typing import Any

import pytest

from gpufleet.errors import FleetError
from gpufleet.settings.litellm_settings import Litellm
from tests.support.rows import each_row
from tests.unit.importer.test_import import accepted, imported, told

MANY = "--tensor-parallel-size 8 --enable-expert-parallel"
HYBRID = "--data-parallel-size 16 --data-parallel-size-local 8 --data-parallel-hybrid-lb"


@each_row(
    ("flags", "kept"),
    [
        (f"{MANY} --enable-eplb",
         {"tensor_parallel": 8, "expert_parallel": True, "flags": {"enable-eplb": True}}),
        (f"{MANY} --enable-eplb --eplb-config '{{\"num_redundant_experts\": 32}}'",
         {"tensor_parallel": 8, "expert_parallel": True,
          "flags": {"enable-eplb": True, "eplb-config": {"num_redundant_experts": 32}}}),
        ("-tp 8 -dcp 4",
         {"tensor_parallel": 8, "flags": {"decode-context-parallel-size": 4}}),
        # Refused by vLLM itself: no more than what it refuses goes.
        ("-tp 8 --enable-eplb --seed 7", {"tensor_parallel": 8, "flags": {"seed": 7}}),
        ("-tp 8 --distributed-executor-backend ray",
         {"tensor_parallel": 8, "distributed_executor_backend": "ray"}),
        ("-tp 8 --distributed-executor-backend mp", {"tensor_parallel": 8}),
        ("--distributed-executor-backend uni", {}),
        ("-tp 8 -pp 2 --nnodes 2 --node-rank 0 --master-addr 10.0.0.1",
         {"tensor_parallel": 8, "pipeline_parallel": 2, "span_nodes": True}),
        (f"{HYBRID} --data-parallel-address 10.0.0.1 --enable-expert-parallel",
         {"data_parallel": 16, "expert_parallel": True, "data_parallel_balancing": "hybrid",
          "span_nodes": True}),
        ("-dp 8 --data-parallel-size-local 8 --data-parallel-address 127.0.0.1",
         {"data_parallel": 8}),
        ("-dp 8 --data-parallel-external-lb --data-parallel-rank 0",
         {"data_parallel": 8, "data_parallel_balancing": "external"}),
    ],
)  # fmt: skip
def test_a_flag_that_needs_another_is_kept_beside_it(flags: str, kept: dict[str, Any]) -> None:
    found = imported(f"vllm serve /m {flags}")
    (one,) = found.settings["serving"].values()

    assert {key: value for key, value in one.items() if key not in {"model", "served_name"}} == kept
    assert accepted(found.settings).serving


def test_what_runs_over_several_nodes_is_told() -> None:
    found = imported("vllm serve /m -tp 8 --nnodes 2 --node-rank 1 --headless")
    assert "`span_nodes: true` allows this in the plan," in told(found)
    assert any("process of a further node" in note.text for note in found.notes if note.decide)

    ray = imported("vllm serve /m -tp 8 --distributed-executor-backend ray")
    assert any("set `span_nodes: true`" in note.text for note in ray.notes if note.decide)


def test_what_the_plan_decides_takes_nothing_else_with_it() -> None:
    """vLLM refuses more local engines than there are; the plan decides how many those are."""
    found = imported("vllm serve /m --data-parallel-size 2 --data-parallel-size-local 4")

    assert found.settings["serving"]["model"]["data_parallel"] == 2
    assert "`--data-parallel-size-local 4` is dropped: the plan decides" in told(found)


FP8 = "VLLM_USE_FLASHINFER_MOE_FP8=1"


@each_row(
    ("line", "backend", "said", "decide"),
    [
        (f"{FP8} vllm serve /m --quantization fp8", "flashinfer_trtllm", "has FP8 experts", False),
        (f"{FP8} VLLM_FLASHINFER_MOE_BACKEND=throughput vllm serve /m -q fp8",
         "flashinfer_cutlass", "has FP8 experts", False),
        (f"{FP8} vllm serve /m --quantization awq", None, "the model has different experts", False),
        (f"{FP8} vllm serve /m-AWQ", None, "whether the model has such experts:", True),
        (f"{FP8} vllm serve /m --quantization compressed-tensors", None, "whether the model", True),
        ("VLLM_USE_FLASHINFER_MOE_FP8=0 vllm serve /m -q fp8", None, "it is off", False),
        ("VLLM_USE_FLASHINFER_MOE_FP16=1 vllm serve /m -q fp8", None, "different experts", False),
        ("VLLM_USE_FLASHINFER_MOE_FP16=1 vllm serve /m", None, "whether the model has", True),
        ("VLLM_FLASHINFER_MOE_BACKEND=latency vllm serve /m", None, "no effect", False),
    ],
)  # fmt: skip
def test_flashinfer_s_variables_become_a_flag_only_where_they_did_something(
    line: str, backend: str | None, said: str, decide: bool
) -> None:
    found = imported(line)
    (one,) = found.settings["serving"].values()

    assert one.get("flags", {}).get("moe-backend") == backend
    assert "environment" not in one
    notes = [note for note in found.notes if "FLASHINFER_MOE" in note.text]
    assert any(note.decide for note in notes) is decide
    assert said in " ".join(note.text for note in notes)


BROKEN = """
vllm serve /m \\
  --seed 3 \\ # the seed
  --max-num-seqs 4 \\
  --block-size 32
"""


def test_flags_behind_a_broken_continuation_are_in_the_settings_with_a_word() -> None:
    found = imported(BROKEN)

    assert found.settings["serving"]["model"]["flags"] == {
        "seed": 3, "max-num-seqs": 4, "block-size": 32,
    }  # fmt: skip
    assert any("line 3 has text after" in note.text for note in found.notes if note.decide)


@each_row(
    "text",
    [
        "vllm serve /m \\\n  --seed 3\n  --max-num-seqs 4\n",
        "vllm serve /m \\\n  --seed 3 \\\n\n  --max-num-seqs 4\n",
        "vllm serve /m \\\n  --seed 3  # so \\\n  --max-num-seqs 4\n",
    ],
)
def test_flags_in_lines_of_their_own_are_in_a_note(text: str) -> None:
    """A shell would not give them to vLLM."""
    found = imported(text)

    assert found.settings["serving"]["model"]["flags"] == {"seed": 3}
    assert any(
        "`--max-num-seqs 4` follows on separate lines" in n.text for n in found.notes if n.decide
    )


def test_a_secret_in_a_line_of_its_own_is_not_shown() -> None:
    found = imported("vllm serve /m\n  --api-key mellon123 --seed 7\n")

    assert "`--seed 7` follows on separate lines" in told(found)
    assert "mellon123" not in told(found)


def test_a_comment_between_continued_lines_is_told() -> None:
    found = imported("vllm serve /m \\\n  # --enforce-eager \\\n  --seed 3\n")

    assert found.settings["serving"]["model"]["flags"] == {"seed": 3}
    assert any("line 2 is a comment" in note.text for note in found.notes if note.decide)


# -- LiteLLM ---------------------------------------------------------------------------------------


def proxy(litellm: str, more: str = "") -> Any:
    """Return what a models file with one server says of LiteLLM, and the import."""
    found = imported(
        f"models: [{{name: a, command: vllm serve /m --served-model-name org/a, "
        f"litellm: {litellm}}}{more}]",
        "m.yml",
    )
    said = found.settings.get("litellm", {})
    Litellm.model_validate(
        {"version": "1.106.2", "lock": "l", "allow_unauthenticated": True, **said}
    )
    return said, found


@each_row(
    ("litellm", "kept"),
    [
        ("{model: hosted_vllm/org/a, temperature: 0.2, max_tokens: 64}",
         {"models": {"org/a": {"parameters": {"temperature": 0.2, "max_tokens": 64}}}}),
        ("{model_name: chat, litellm_params: {model: hosted_vllm/org/a}}",
         {"aliases": {"chat": "org/a"}}),
        ("{model_name: chat, litellm_params: {model: openai/org/a, top_p: 0.9, stop: END}}",
         {"models": {"chat": {"entries": ["a"], "parameters": {"top_p": 0.9, "stop": ["END"]}}}}),
        ("[{model_name: a, model: hosted_vllm/org/a}, {model_name: b, model: hosted_vllm/org/a}]",
         {"aliases": {"a": "org/a", "b": "org/a"}}),
        ("{model: hosted_vllm/org/a}", {}),
        ("{temperature: '0.2'}", {}),
        ("[x]", {}),
    ],
)  # fmt: skip
def test_litellm_s_part_is_what_its_deploy_takes(litellm: str, kept: dict[str, Any]) -> None:
    assert proxy(litellm)[0] == kept


def test_a_name_over_two_servers_has_both() -> None:
    said, found = proxy(
        "{model_name: chat, temperature: 0.2, seed: 1}",
        ", {name: b, command: vllm serve /n, "
        "litellm: {model_name: chat, temperature: 0.3, seed: 1}}",
    )
    assert said == {"models": {"chat": {"entries": ["a", "b"], "parameters": {"seed": 1}}}}
    assert any(
        "different values of `temperature`" in note.text for note in found.notes if note.decide
    )


def test_what_litellm_says_of_servers_is_told_by_its_key() -> None:
    _, found = proxy("{model: hosted_vllm/org/b, api_key: mellon123, api_base: http://x, tag: t1}")

    for key in ("api_key", "api_base", "tag"):
        assert f"`litellm`'s `{key}` is dropped" in told(found)
    assert "mellon123" not in told(found)
    assert "LiteLLM requests the model `org/b`, but the server has the name `org/a`" in told(found)


ARRAY = """
PORT=9000
ARGS=(
  --port "$PORT"          # what clients know
  --max-model-len 8192
  --hf-overrides '{"a": "b c"}'
)
ARGS+=(--seed 7)
declare -a MORE=(--tensor-parallel-size 2)
vllm serve /m "${ARGS[@]}" ${MORE[*]}
"""


def test_words_of_an_array_are_read_where_it_is_used() -> None:
    (one,) = imported(ARRAY).settings["serving"].values()
    assert one == {
        "model": "/m",
        "served_name": "/m",
        "tensor_parallel": 2,
        "context": 8192,
        "port": 9000,
        "flags": {"hf-overrides": {"a": "b c"}, "seed": 7},
    }


def test_an_array_may_be_the_whole_command_and_has_no_secret_of_its_own() -> None:
    found = imported('CMD=(vllm serve /m --api-key sk-123456789)\nexec "${CMD[@]}"\n')
    assert [*found.settings["serving"].values()] == [{"model": "/m", "served_name": "/m"}]
    assert "sk-123456789" not in told(found)


def test_what_is_added_on_a_condition_is_read_or_told() -> None:
    text = """
        A=(--seed 7)
        if [ -n "$TP" ]; then A+=(--tensor-parallel-size "$TP"); fi
        [ -n "$X" ] && A+=(--port 9000)
        vllm serve /m "${A[@]}"
    """
    found = imported(text)
    (one,) = found.settings["serving"].values()
    assert (one["port"], one["flags"]) == (9000, {"seed": 7})
    assert any("--tensor-parallel-size $TP" in note.text for note in found.notes if note.decide)


def test_a_template_of_yaml_is_called_one() -> None:
    with pytest.raises(
        FleetError, match="the file is a template: give the output of `helm template`"
    ):
        imported("spec:\n  replicas: {{ .Values.n }}\n", file="x.yaml")


def test_an_array_that_is_not_known_stays_as_written() -> None:
    found = imported('vllm serve /m "${ARGS[@]}"')
    assert any("`${ARGS[@]}`" in note.text for note in found.notes if note.decide)


def test_what_a_shell_would_compute_is_one_word() -> None:
    found = imported("vllm serve $(cat model.txt) --seed `date +%s` --port 9000")
    (one,) = found.settings["serving"].values()
    assert (one["model"], one["port"]) == ("$(cat model.txt)", 9000)
    assert any("`--seed `date +%s``" in note.text for note in found.notes if note.decide)


def test_supervisors_program_is_a_server() -> None:
    text = (
        "[program:llm]\n"
        "command=/opt/vllm/bin/vllm serve /m --port 9000\n"
        'environment=VLLM_LOGGING_LEVEL="DEBUG",NCCL_DEBUG="INFO"\n'
        "autostart=true\n"
    )
    (one,) = imported(text).settings["serving"].values()
    assert one["port"] == 9000
    assert one["environment"] == {"VLLM_LOGGING_LEVEL": "DEBUG", "NCCL_DEBUG": "INFO"}


@each_row(
    "text",
    [
        'FROM vllm/vllm-openai:v0.11.0\nCMD ["--model", "/m", "--port", "9000"]\n',
        'FROM python:3.12\nENTRYPOINT ["vllm", "serve", "/m"]\nCMD ["--port", "9000"]\n',
        "ARG TAG\nFROM python:${TAG}\nCMD vllm serve /m \\\n  # ours\n  --port 9000\n",
        "FROM a AS build\nCMD vllm serve /x\nFROM b\nENV PORT=9000\nCMD vllm serve /m --port $PORT",
        'FROM b\nENV PORT 9000\nCMD ["sh", "-c", "vllm serve /m --port $PORT"]\n',
    ],
)
def test_a_dockerfile_is_the_command_of_its_image(text: str) -> None:
    (one,) = imported(text).settings["serving"].values()
    assert (one["model"], one["port"]) == ("/m", 9000)


def test_options_of_docker_are_named_as_they_were_typed() -> None:
    found = told(imported("docker run --rm -it vllm/vllm-openai:v0.11.0 --model /m"))
    assert "--rm is dropped" in found
    assert "-it is dropped" in found


@each_row(
    ("flags", "says"),
    [
        ("--tokenizer org/name", "`tokenizer`: org/name is a name on the Hub"),
        (
            '--speculative-config \'{"model":"org/d","num_speculative_tokens":3}\'',
            "org/d is a name",
        ),
        (
            "--enable-lora --lora-modules a=org/b",
            "`adapters.a.revision` must be the commit of org/b",
        ),
        ("--chat-template ./t.jinja", "'./t.jinja' is not an absolute path"),
    ],
)
def test_what_a_server_cannot_open_is_left_to_decide(flags: str, says: str) -> None:
    """The settings would refuse it, so the import says it."""
    found = imported(f"vllm serve /m {flags}")
    assert any(says in note.text for note in found.notes if note.decide)


def test_a_shells_keyword_is_no_program_and_a_loop_is_said() -> None:
    found = imported(
        "if true; then vllm serve /a; fi\nfor n in 1 2; do vllm serve /b --seed 1 & done\n"
    )

    said = [note for note in found.notes if "in front" in note.text or "loop" in note.text]
    assert [(note.decide, "runs in a shell loop" in note.text) for note in said] == [(True, True)]

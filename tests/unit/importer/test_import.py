"""What people have becomes settings, nothing is lost without a word, and no key is printed."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from gpufleet import redact
from gpufleet.cli.import_command import import_
from gpufleet.engines.sglang import sglang_check
from gpufleet.errors import FleetError
from gpufleet.flags import arguments, schema, values
from gpufleet.flags.check import check
from gpufleet.flags.command_line import parse
from gpufleet.flags.schema import Flag
from gpufleet.importer import shell
from gpufleet.importer.convert import Imported, convert
from gpufleet.importer.detect import read
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.parse import parse_settings
from tests.support.rows import each_row

NEWEST = schema.load("0.33.0")
KEY = "sk-abcdefghijklmnop"
TOKEN = "hf_abcdefghijklmnopqrstuv"
COMMIT = "0123456789abcdef0123456789abcdef01234567"

MODELS_FILE = f"""
# One machine, two models
env:
  VLLM_LOGGING_LEVEL: INFO
models:
  - name: Qwen 72B (chat)
    command: >-
      vllm serve Qwen/Qwen2.5-72B-Instruct-AWQ --host 0.0.0.0 --port 8001
      --tensor-parallel-size 4 --max-model-len 32k --swap-space 8
      --gpu-memory-utilization 0.92 --enable-reasoning --guided-decoding-backend xgrammar
      --api-key {KEY} --disable-log-requests --served-model-name qwen72
      --enable-auto-tool-choice --tool-call-parser hermes
    env:
      VLLM_USE_V1: "1"
      VLLM_ATTENTION_BACKEND: FLASH_ATTN
      HF_TOKEN: {TOKEN}
      CUDA_VISIBLE_DEVICES: 0,1,2,3
    litellm:
      model: hosted_vllm/qwen72
      api_base: http://gpu1:8001/v1
      api_key: {KEY}
      temperature: 0.2
  - name: coder
    command:
      - python3
      - -m
      - vllm.entrypoints.openai.api_server
      - --model
      - /models/deepseek-coder
      - --speculative-model
      - /models/draft
      - --num-speculative-tokens
      - "5"
      - --compilation-config
      - '{{"cudagraph_mode": "FULL"}}'
"""

SCRIPT = f"""
#!/bin/bash
# start the server; don't forget the key
set -euo pipefail
MODEL="${{MODEL:-meta-llama/Llama-3.3-70B-Instruct}}"  # the model's name
export VLLM_WORKER_MULTIPROC_METHOD=spawn
export HF_HOME=/data/hf NCCL_DEBUG=WARN
PORT=8080
HF_TOKEN={TOKEN} nohup vllm serve "$MODEL" \\
    --port $PORT \\
    --tensor-parallel-size 8 \\
    # --enforce-eager \\
    --revision {COMMIT} \\
    --hf-overrides '{{"rope_parameters": {{"rope_type": "yarn",
                     "factor": 4.0}}}}' \\
    -O3 --no-enable-prefix-caching \\
    --api-key "$API_KEY" "$@" > vllm.log 2>&1 &
echo started
"""

DOCKER = f"""
docker run -d --name llama --runtime nvidia --gpus '"device=0,1"' \\
  -v ~/.cache/huggingface:/root/.cache/huggingface -v /data/models:/models:ro \\
  --env "HUGGING_FACE_HUB_TOKEN={TOKEN}" -e VLLM_USE_V1=0 -e NCCL_DEBUG=INFO \\
  -p 127.0.0.1:9000:8000 --ipc=host --shm-size=16g --restart unless-stopped \\
  vllm/vllm-openai:v0.10.2 \\
  --model /models/Llama-3.1-8B-Instruct --max-model-len 16384 --kv-cache-dtype fp8
"""

COMPOSE = f"""
services:
  chat:
    image: vllm/vllm-openai:latest
    command: ["--model", "Qwen/Qwen3-8B", "--max-model-len", "8192", "--hf-token", "{TOKEN}"]
    environment:
      - HF_TOKEN=${{HF_TOKEN}}
      - VLLM_LOGGING_LEVEL=${{LEVEL:-DEBUG}}
    ports: ["8005:8000"]
    volumes: ["hf:/root/.cache/huggingface"]
    ipc: host
    deploy:
      resources: {{reservations: {{devices: [{{driver: nvidia, count: 1}}]}}}}
  litellm:
    image: ghcr.io/berriai/litellm:main
"""

SAMPLES = {"models.yml": MODELS_FILE, "start.sh": SCRIPT, "run.txt": DOCKER, "compose.yml": COMPOSE}


def imported(text: str, file: str = "serve.sh") -> Imported:
    """Return what a text becomes for the newest release."""
    source = read(textwrap.dedent(text), file, "model")
    found = convert(source.launches, NEWEST, source.names)
    return Imported(found.settings, (*source.notes, *found.notes))


def served(text: str, file: str = "serve.sh") -> dict[str, Any]:
    """Return the settings of the one server of a text."""
    (one,) = imported(text, file).settings["serving"].values()
    return dict(one)


def told(found: Imported) -> str:
    """Return every note."""
    return "\n".join(map(str, found.notes))


def accepted(found: Mapping[str, Any]) -> NodeSettings:
    """Return the settings with what only the operator knows: a release, its lock, the commits."""
    releases = {"vllm": NEWEST.version, "sglang": sglang_check.newest()}
    used = {served.get("engine", "vllm") for served in found["serving"].values()}
    sections = {
        engine: {
            "version": releases[engine],
            "lock": f"locks/{engine}.txt",
            "allow_unauthenticated": True,
            **found.get(engine, {}),
        }
        for engine in used
    }
    serving = {
        name: {key: COMMIT if key == "revision" and not value else value
               for key, value in model.items()}
        for name, model in found["serving"].items()
    }  # fmt: skip
    return parse_settings({**sections, "serving": serving})


# -- the round trip --------------------------------------------------------------------------------


def test_a_secret_is_hidden_wherever_else_it_stands():
    """The value alone does not look like a secret."""
    found = imported("vllm serve m --door-token mellon123 --door-word mellon123")

    assert "--door-word" in told(found)
    assert "mellon123" not in told(found)
    assert "mellon123" not in yaml.safe_dump(found.settings)


def test_a_secret_variable_becomes_one_by_a_file():
    found = imported("AWS_SECRET_ACCESS_KEY=mellon123 vllm serve org/m --served-model-name chat")

    (model,) = accepted(found.settings).serving.values()
    assert model.environment_files == {
        "AWS_SECRET_ACCESS_KEY": "secrets/model-aws-secret-access-key"
    }
    assert "secrets/model-aws-secret-access-key" in told(found)
    assert "mellon123" not in told(found) + yaml.safe_dump(found.settings)


def test_the_name_of_a_variable_is_no_secret():
    found = imported("FOO='$KEY' vllm serve m --api-key '$KEY'")

    assert "`$KEY`" in told(found)


@pytest.mark.parametrize(
    ("flag", "ends"),
    [
        ("--max-model-length 1000", "it is dropped. Use instead: --max-model-len"),
        ("--foo 3", "this release has no option `--foo`; dropped"),
        ("--rope-scaling {}", "it is rewritten to `--hf-overrides.rope_parameters {}`"),
    ],
)
def test_a_flag_that_the_release_lacks_is_dropped_with_what_stands_for_it(
    flag: str, ends: str
) -> None:
    (note,) = [str(each) for each in imported(f"vllm serve /m {flag}").notes if "`--" in str(each)]

    assert note.endswith(ends)


@pytest.mark.parametrize("file", SAMPLES)
def test_what_comes_out_is_what_our_settings_take(file: str) -> None:
    """A person adds the commits; nothing else has to be changed."""
    found = imported(SAMPLES[file], file)

    assert accepted(found.settings).serving.keys() == found.settings["serving"].keys()


@pytest.mark.parametrize("file", SAMPLES)
def test_the_yaml_says_the_same_as_the_values(file: str, tmp_path: Path) -> None:
    """What is printed, read again, is what was converted."""
    path = tmp_path / file
    path.write_text(SAMPLES[file])

    run = CliRunner().invoke(import_, [str(path), "--vllm", "0.33.0"], standalone_mode=False)

    assert run.return_value == 1  # each sample leaves something to decide
    assert yaml.safe_load(run.stdout)["serving"].keys() == (
        imported(SAMPLES[file], file).settings["serving"].keys()
        if file != "start.sh"
        else {"start"}
    )


@pytest.mark.parametrize("file", SAMPLES)
def test_no_key_is_printed(file: str, tmp_path: Path) -> None:
    """Neither on standard output nor in a sentence about it."""
    path = tmp_path / file
    path.write_text(SAMPLES[file])

    run = CliRunner().invoke(import_, [str(path)])

    assert KEY not in run.output + run.stderr
    assert TOKEN not in run.output + run.stderr


# -- each form -------------------------------------------------------------------------------------


def test_a_list_of_models_becomes_one_entry_each() -> None:
    """Commands as text and as words; LiteLLM's part becomes `litellm`."""
    found = imported(MODELS_FILE, "models.yml")

    assert found.settings == {
        "vllm": {
            "hf_token_file": "secrets/hf-token",
            "api_key_file": "secrets/vllm-api-key",
            "environment": {"VLLM_LOGGING_LEVEL": "INFO"},
        },
        "serving": {
            "qwen-72b-chat": {
                "model": "Qwen/Qwen2.5-72B-Instruct-AWQ",
                "revision": None,
                "served_name": "qwen72",
                "context": 32_000,
                "tensor_parallel": 4,
                "port": 8001,
                "flags": {
                    "attention-backend": "FLASH_ATTN",
                    "enable-auto-tool-choice": True,
                    "enable-log-requests": False,
                    "gpu-memory-utilization": 0.92,
                    "structured-outputs-config": {"backend": "xgrammar"},
                    "tool-call-parser": "hermes",
                },
            },
            "coder": {
                "model": "/models/deepseek-coder",
                "served_name": "/models/deepseek-coder",
                "flags": {
                    "compilation-config": {"cudagraph_mode": "FULL"},
                    "speculative-config": {"model": "/models/draft", "num_speculative_tokens": 5},
                },
            },
        },
        "litellm": {"models": {"qwen72": {"parameters": {"temperature": 0.2}}}},
    }
    for dropped in (
        "--swap-space", "--enable-reasoning", "--host", "--api-key", "litellm", "VLLM_USE_V1",
        "VLLM_ATTENTION_BACKEND", "HF_TOKEN", "CUDA_VISIBLE_DEVICES", "`api_base`", "`api_key`",
    ):  # fmt: skip
        assert dropped in told(found)


def test_a_script_is_read_as_a_shell_would() -> None:
    """Variables, continued lines, quotes over lines, comments in between, redirections."""
    assert served(SCRIPT) == {
        "model": "meta-llama/Llama-3.3-70B-Instruct",
        "revision": COMMIT,
        "served_name": "meta-llama/Llama-3.3-70B-Instruct",
        "tensor_parallel": 8,
        "port": 8080,
        "flags": {
            "enable-prefix-caching": False,
            "hf-overrides": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
            "optimization-level": "3",
        },
        "environment": {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "NCCL_DEBUG": "WARN"},
    }
    assert "a shell replaces `$@`" in told(imported(SCRIPT))


def test_a_container_s_paths_and_port_become_the_node_s() -> None:
    """Clients keep the name that they ask for, the model is where the mount comes from."""
    found = imported(DOCKER)

    assert found.settings["serving"]["llama"] == {
        "model": "/data/models/Llama-3.1-8B-Instruct",
        "served_name": "/models/Llama-3.1-8B-Instruct",
        "context": 16384,
        "port": 9000,
        "flags": {"kv-cache-dtype": "fp8"},
        "environment": {"NCCL_DEBUG": "INFO"},
    }
    for dropped in ("v0.10.2", "--gpus", "--ipc", "--shm-size", "--restart", "--runtime", "-d ",
                    "/root/.cache/huggingface", "VLLM_USE_V1"):  # fmt: skip
        assert dropped in told(found)


def test_a_compose_file_s_vllm_services_are_taken() -> None:
    """The others are named and left out."""
    found = imported(COMPOSE, "compose.yml")

    assert found.settings["serving"] == {
        "chat": {
            "model": "Qwen/Qwen3-8B",
            "revision": None,
            "served_name": "Qwen/Qwen3-8B",
            "context": 8192,
            "port": 8005,
            "environment": {"VLLM_LOGGING_LEVEL": "DEBUG"},
        }
    }
    assert "service `litellm` does not run vLLM" in told(found)


@each_row(
    "line",
    [
        "vllm serve org/m --seed 7",
        "/opt/venv/bin/vllm serve org/m --seed=7",
        "vllm serve --model org/m --seed 7",
        "vllm serve --model=org/m --seed 7",
        "python -m vllm.entrypoints.openai.api_server --model org/m --seed 7",
        "exec nohup vllm serve org/m --seed 7 >log 2>&1 &",
        "cd /srv && . venv/bin/activate && vllm serve org/m --seed 7 | tee log",
        "sudo -u vllm env A=b vllm serve org/m --seed 7 # the seed",
        "if ! vllm serve org/m --seed 7; then echo 'vllm serve org/n'; fi",
        "echo vllm serve org/n\nvllm serve --help | grep seed\nvllm serve org/m --seed 7",
        "cat > readme <<'EOF'\ndon't: vllm serve org/n\nEOF\nvllm serve org/m --seed 7",
        "ssh gpu-01 'nohup vllm serve org/m --seed 7 &'",
        "srun -N1 bash -lc 'vllm serve org/m --seed 7'",
        "EMPTY=\nvllm serve org/m $EMPTY --seed 7",
        "[Service]\nEnvironment=A=b\nExecStart=/opt/vllm/bin/vllm serve org/m --seed 7\n",
        "docker run --rm --gpus all vllm/vllm-openai:v0.30.0 --model org/m --seed 7",
        "podman run vllm/vllm-openai org/m --seed 7",
        "docker run --entrypoint vllm vllm/vllm-openai serve org/m --seed 7",
        "docker run -it vllm/vllm-openai bash -c 'vllm serve org/m --seed 7'",
        "docker run --entrypoint bash vllm/vllm-openai -c 'exec vllm serve org/m --seed 7'",
        "M=org/m\nvllm serve $M --seed 7",
        "ARGS='org/m --seed 7'\nvllm serve $ARGS",
        "vllm serve org/m \\\n  --seed \\\n  7\n",
        "models:\n  - {name: a, command: vllm serve org/m --seed 7}\n",
        "models:\n  a: {model: org/m, args: [--seed, 7]}\n",
        "models:\n  a: {command: [vllm, serve, org/m, --seed, '7']}\n",
        "- name: a\n  command: org/m --seed 7\n",
        "- name: a\n  command: [vllm serve org/m, --seed 7]\n",
        "models:\n  a:\n    model: org/m\n    vllm: {seed: 7}\n    litellm: [x]\n",
        "- name: a\n  command:\n  - org/m\n  args:\n  - --seed 7\n",
        "services:\n  a: {image: 'vllm/vllm-openai', command: --model org/m --seed 7}\n",
        "services:\n  a:\n    image: mine/vllm\n    entrypoint: [vllm, serve]\n"
        "    command: [org/m, --seed, '7']\n",
    ],
)
def test_every_way_to_write_it_means_the_same(line: str) -> None:
    """One server of org/m with one flag."""
    found = served(line, "-")

    assert (found["model"], found["flags"]) == ("org/m", {"seed": 7})


@each_row(
    ("flags", "kept"),
    [
        ("-tp 2", {"tensor_parallel": 2}),
        ("--tensor_parallel_size=2", {"tensor_parallel": 2}),
        ("-pp 2 -dp 4 --enable-expert-parallel",
         {"pipeline_parallel": 2, "data_parallel": 4, "expert_parallel": True}),
        ("--max-model-len 32K", {"context": 32768}),
        ("--max-model-len auto", {"flags": {"max-model-len": -1}}),
        ("--shutdown-timeout 90", {"drain_seconds": 90}),
        ("--port 8000", {}),
        ("--host ::1 --nnodes 1 --node-rank 0 --master-addr a", {}),
        ("--download-dir /models", {}),
        ("--lora-modules b=/b a=/a --enable-lora",
         {"adapters": {"a": {"source": "/a"}, "b": {"source": "/b"}}}),
        ("--enable-lora --max-lora-rank 64 --lora-modules '{\"name\": \"a\", \"path\": \"/a\"}'",
         {"adapters": {"a": {"source": "/a"}}, "flags": {"max-lora-rank": 64}}),
        ("--enable-lora --lora-modules a/b=/a",
         {"flags": {"lora-modules": ["a/b=/a"], "enable-lora": True}}),
        ("--compilation-config.mode 3", {"flags": {"compilation-config": {"mode": 3}}}),
        ("--kv-transfer-config '{\"kv_connector\": \"NixlConnector\", \"kv_role\": \"kv_both\"}'",
         {"flags": {"kv-transfer-config":
                    {"kv_connector": "NixlConnector", "kv_role": "kv_both"}}}),
        ("--num-scheduler-steps 8 --use-v2-block-manager --preemption-mode swap", {}),
        ("--disable-log-stats --trust-remote-code",
         {"flags": {"disable-log-stats": True, "trust-remote-code": True}}),
    ],
)  # fmt: skip
def test_a_flag_becomes_a_setting_or_is_told_about(flags: str, kept: dict[str, Any]) -> None:
    """Ours where there is one, vLLM's else, and a sentence where it is neither."""
    found = imported(f"vllm serve /m {flags}")
    (one,) = found.settings["serving"].values()

    assert {key: value for key, value in one.items() if key not in {"model", "served_name"}} == kept
    assert accepted(found.settings).serving


POOLING = {"runner": "pooling"}


@each_row(
    ("flags", "kind", "kept"),
    [
        ("--task embed", "embed", {**POOLING, "convert": "embed"}),
        ("--task=score", "rerank", {**POOLING, "convert": "classify"}),
        ("--task classify", "classify", {**POOLING, "convert": "classify"}),
        ("--task reward", "reward", POOLING),
        ("--task transcription", "transcribe", {"runner": "generate"}),
        ("--runner pooling --convert embed", "embed", {**POOLING, "convert": "embed"}),
        # Their files say which: an embedder, or one that classifies.
        ("--runner pooling", "by the files", POOLING),
        ("--task generate", "by the files", {"runner": "generate"}),
        ("", "by the files", None),
    ],
)
def test_what_a_model_is_asked_for_is_its_kind(
    flags: str, kind: str, kept: dict[str, Any] | None
) -> None:
    found = imported(f"vllm serve /m {flags}")
    (one,) = found.settings["serving"].values()

    assert (one.get("kind", "by the files"), one.get("flags")) == (kind, kept)
    assert accepted(found.settings).serving
    assert found.decided


def test_a_kind_that_the_flags_leave_open_is_to_be_decided() -> None:
    found = imported("vllm serve /m --runner pooling --convert classify")
    (one,) = found.settings["serving"].values()

    assert (one["kind"], one["flags"]) == (None, {**POOLING, "convert": "classify"})
    (open_one,) = (str(note) for note in found.notes if note.decide)
    assert "`kind` must be rerank or classify" in open_one


def test_the_release_decides_how_flags_are_written() -> None:
    """The same line, for a release that still has the flag."""
    launches = read("vllm serve /m --swap-space 4", "-", "m").launches

    assert convert(launches, schema.load("0.17.0")).settings["serving"]["m"]["flags"] == {
        "swap-space": 4
    }
    assert "flags" not in convert(launches, NEWEST).settings["serving"]["m"]


def test_what_only_a_person_knows_is_marked() -> None:
    """Unset variables, unknown flags, a branch for a revision, a model that is no id."""
    found = imported(
        "vllm serve gpt2 --served-model-name $NAME --revision main --no-such-flag 3 "
        "--chat-template $TEMPLATE"
    )
    decide = [str(note) for note in found.notes if note.decide]

    for what in ("gpt2", "$NAME", "--no-such-flag", "$TEMPLATE"):
        assert any(what in sentence for sentence in decide), what
    assert not found.decided


def test_two_servers_of_one_name_stay_two() -> None:
    """Both are there, the second one numbered."""
    found = imported("vllm serve org/a --port 8000 &\nvllm serve org/b --port 8001 &\n")

    assert [one["model"] for one in found.settings["serving"].values()] == ["org/a", "org/b"]
    assert accepted(found.settings).serving


@each_row(
    ("text", "file", "said"),
    [
        ("echo hello", "a.sh", "the file does not start vLLM"),
        ("vllm serve 'org/m", "a.sh", "never closed"),
        ("a: [", "a.yml", "is not valid YAML"),
        ("plain: 1", "a.yml", "which is not a known format"),
        ("models:\n  - name: a\n    env: {A: b}\n", "a.yml", "neither `command` nor `model`"),
        ('models: [{name: a, command: "vllm \'x"}]', "a.yml", "models.a: the quote that is opened"),
        (
            'models: [{name: a, model: m, args: "\'x"}]',
            "a.yml",
            "models.a: a closing quote is missing",
        ),
        ("[" * 5000, "a.yml", "nested too deeply"),
        ("models: 3", "a.yml", "neither a list nor a mapping"),
        ("models: [3]", "a.yml", "is not a mapping"),
        ("services:\n  a: {image: nginx}\n", "a.yml", "the file does not start vLLM"),
    ],
)
def test_what_cannot_be_read_is_refused_with_what_to_give(text: str, file: str, said: str) -> None:
    """Never half an import."""
    with pytest.raises(FleetError, match=said):
        imported(text, file)


def plausible(flag: Flag) -> tuple[str, ...]:
    """Return words that give a flag some value of its type."""
    if not flag.takes_value:
        return (flag.name,)
    texts = {"int": "3", "float": "0.5", "human_readable_int": "4k", "bool": "true"}
    base = flag.type.base if flag.type else "str"
    if flag.choices:
        value = str(next(choice for choice in flag.choices if choice is not None))
    elif flag.type and flag.type.json_class:
        value = "{}"
    else:
        value = texts.get(base, "abc")
    more = (value,) if flag.nargs == "+" else ()
    return (flag.name, value, *more)


@pytest.mark.parametrize("version", ["0.18.0", "0.24.0", "0.33.0"])
def test_every_flag_of_a_release_comes_through_unchanged(version: str) -> None:
    """What the release takes from the settings is what it took from the command line."""
    release = schema.load(version)
    through = 0
    for flag in release.flags:
        words = ("/m", *plausible(flag))
        if flag.positional or any(one.refuses for one in check(release, words)):
            continue
        launches = read(shlex.join(("vllm", "serve", *words)), "-", "m").launches
        (one,) = convert(launches, release).settings["serving"].values()
        flags = one.get("flags", {})
        if not flags:  # it is a setting of ours, or told about: other tests say which
            continue
        again = (
            "/m",
            *(word for key, value in flags.items() for word in arguments.words(key, value)),
        )
        before, after = parse(release, words).by_name, parse(release, again).by_name
        assert before.keys() == after.keys(), flag.name
        assert [values.read(release, given) for given in before[flag.name]] == [
            values.read(release, given) for given in after[flag.name]
        ], flag.name
        through += 1

    assert through > len(release.flags) // 2


# -- rules -----------------------------------------------------------------------------------------

WORDS = st.sampled_from(
    [
        *("vllm", "serve", "docker", "run", "-e", "A=b", "--model", "org/m", "-p", "1:2", "--seed"),
        *("7", "--", "-", ";", "&", "|", ">", "2>&1", "$A", "${A:-b}", "\\", "#", "'", '"', "\n"),
        *(
            '{"a": 1}',
            "vllm/vllm-openai",
            "--env",
            "--api-key",
            "python",
            "-m",
            "export",
            "=",
            "-v",
        ),
    ]
)


@settings(max_examples=300, deadline=None)
@given(st.lists(WORDS, max_size=20).map(" ".join))
def test_any_text_is_read_or_refused(text: str) -> None:
    """Nothing but a FleetError for whatever is pasted."""
    try:
        found = imported(text, "-")
    except FleetError:
        return
    assert found.settings["serving"]


@settings(max_examples=100, deadline=None)
@given(st.from_regex(r"(hf_[A-Za-z0-9]{20}|sk-[A-Za-z0-9]{20})", fullmatch=True))
def test_a_key_is_hidden_wherever_it_stands(key: str) -> None:
    """As a flag's value, a variable, in a URL, in JSON."""
    found = imported(
        f"X_API_KEY={key} OTHER=pre-{key} vllm serve /m --api-key {key} --hf-token={key} "
        f'--hf-overrides \'{{"a": "{key}"}}\' --tokenizer https://user:{key}@host/x'
    )

    assert key not in str(found.settings)
    assert key not in told(found)


@each_row(
    ("name", "is_secret"),
    [
        ("HF_TOKEN", True), ("OPENAI_API_KEY", True), ("WANDB_APIKEY", True), ("DB_PASSWORD", True),
        ("TOKENIZERS_PARALLELISM", False), ("VLLM_MAX_TOKENS_PER_EXPERT", False),
        ("API_KEY_FILE", False), ("HF_TOKEN_PATH", False), ("MONKEY", False),
        ("MYTOKEN", True), ("PGPASSWORD", True), ("DB_PASS", True), ("secretKey", True),
        ("AWS_ACCESS_KEY_ID", True), ("--ssl-keyfile-password", True), ("--ssl-keyfile", False),
        ("eos_token", False), ("VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD", False),
    ],
)  # fmt: skip
def test_a_variable_s_name_says_that_it_is_a_secret(name: str, is_secret: bool) -> None:
    """By whole words of the name."""
    assert redact.is_secret_name(name) is is_secret


SECRET = "a-word-of-no-known-form"


@each_row(
    "text",
    [
        f"X_TOKEN={SECRET} vllm serve /m",
        f"OTEL_EXPORTER_OTLP_HEADERS='authorization=Bearer {SECRET}' vllm serve /m",
        f"OTEL_EXPORTER_OTLP_HEADERS=Authorization=Basic%20{SECRET} vllm serve /m",
        f"REDIS_URL=redis://:{SECRET}@host:6379 vllm serve /m",
        f"HOOK='https://host/x?a=b&api_key={SECRET}' vllm serve /m",
        f"vllm serve /m --API-KEY {SECRET}",
        f"vllm serve /m --api_keys={SECRET}",
        f"vllm serve /m --apikey {SECRET}",
        f"vllm serve /m --my-secret-key {SECRET}",
        f"""vllm serve /m --hf-overrides '{{"x": "a=b", "hub": {{"secret_key": "{SECRET}"}}}}'""",
        f"""vllm serve /m --hf-overrides='{{"token": "{SECRET}"}}'""",
        f"vllm serve /m --kv-transfer-config.kv_connector_extra_config.password {SECRET}",
        f"docker run --label auth={SECRET} vllm/vllm-openai --model /m",
        f"docker run --health-cmd 'curl -u a:{SECRET} x' vllm/vllm-openai --model /m",
        f"services: {{a: {{image: vllm/vllm-openai, command: /m, pid: {SECRET}}}}}",
        f"models: [{{model: /m, api_key: {SECRET}}}]",
        f"srun -N 1 --export=ALL,HF_TOKEN={SECRET} vllm serve /m",
        f"vllm serve /m <<< {SECRET}",
        f"vllm serve /m\n  --api-key {SECRET}",
    ],
)
def test_a_secret_is_known_by_what_names_it(text: str) -> None:
    """Its form says nothing; the name of the variable, flag, key or header does."""
    found = imported(text, "-")

    assert SECRET not in str(found.settings)
    assert SECRET not in told(found)


@pytest.mark.parametrize(
    ("text", "file"),
    [(f"vllm serve /m --api-key '{SECRET}", "a.sh"), (f"key: {SECRET}: [", "a.yml")],
)
def test_what_is_wrong_with_a_text_is_said_without_the_text(text: str, file: str) -> None:
    with pytest.raises(FleetError) as error:
        imported(text, file)

    assert SECRET not in str(error.value)
    assert "line 1" in str(error.value)


def test_the_model_may_stand_beside_the_command() -> None:
    found = imported("models: [{model: org/m, command: --seed 3, port: '8001'}]", "a.yml")

    (served,) = found.settings["serving"].values()
    assert (served["model"], served["port"], served["flags"]) == ("org/m", 8001, {"seed": 3})


def test_a_second_server_of_one_command_is_not_lost_in_silence() -> None:
    found = imported("models: [{name: a, command: vllm serve /m & vllm serve /n}]", "a.yml")

    assert "starts 2 servers, but only the first server is imported" in told(found)
    assert not found.decided


def test_a_comment_s_quote_does_not_swallow_the_rest() -> None:
    """An apostrophe in a comment is no quote, and a # in a word no comment."""
    text = "# don't\nvllm serve org/m --chat-template /a#b.jinja  # it's here\necho 'x'\n"
    (launch,) = shell.launches(text, "m")

    assert launch.argv == ("org/m", "--chat-template", "/a#b.jinja")


@pytest.mark.parametrize(
    "text",
    [
        "(vllm serve m/x --port 8001) &\nvllm serve m/y\n",
        "vllm serve m/x;vllm serve m/y\n",
        "vllm serve m/x >x.log 2>&1& vllm serve m/y &>y.log\n",
        "f() { vllm serve m/x; }\ncase $1 in y) vllm serve m/y;; esac\n",
    ],
)
def test_operators_end_a_command_without_spaces_around_them(text: str) -> None:
    launches = shell.launches(text, "model")
    assert [launch.argv[0] for launch in launches] == ["m/x", "m/y"]


def test_the_node_of_a_server_that_ssh_starts_is_told() -> None:
    """A model that ran on one node would else be planned for all."""
    found = imported('ssh -p 2222 gpu-02 "vllm serve /data/m2 --port 8001"\n')

    (note,) = (each for each in found.notes if "ssh" in str(each))
    assert note.decide
    assert "`ssh gpu-02` before the command is dropped" in str(note)


@each_row(("port", "words"), [(80, "--port 80"), (443, "--port 443")])
def test_a_port_that_servers_cannot_open_is_left_to_decide(port: int, words: str) -> None:
    found = imported(f"vllm serve /data/m {words}\n")

    assert [each.decide for each in found.notes if "only root can listen" in str(each)] == [True]
    assert f"{port} as `gateway.port`" in told(found)


@each_row("word", ["$(hostname)", "`hostname`", "$NAME"])
def test_a_name_that_only_a_shell_knows_is_said_once_and_left_to_decide(word: str) -> None:
    """It is not the model's: clients do not use that one."""
    found = imported(f"vllm serve Qwen/Qwen3-8B --served-model-name {word} --port 9000\n")
    (served,) = found.settings["serving"].values()

    assert served["served_name"] is None
    (note,) = (each for each in found.notes if "served" in str(each))
    assert note.decide
    assert word in note.text


@each_row("word", ["'a;b'", "a\\;b", '"(a)&"', "$(hostname)", "`hostname`"])
def test_operators_that_are_quoted_or_computed_end_nothing(word: str) -> None:
    (launch,) = shell.launches(f"vllm serve m/x --served-model-name {word}", "model")
    assert launch.argv[2:] == tuple(shlex.split(word))


def test_a_model_may_stand_behind_flags() -> None:
    found = served("vllm serve --port 9000 --tensor-parallel-size 2 Qwen/Qwen3-8B")
    assert found["model"] == "Qwen/Qwen3-8B"
    assert (found["port"], found["tensor_parallel"]) == (9000, 2)

"""Each kind of file that describes servers or hosts becomes settings, or an inventory file."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from gpufleet.cli.import_command import import_
from gpufleet.errors import FleetError
from gpufleet.importer.detect import read
from gpufleet.inventory import loader
from gpufleet.settings.litellm_settings import Litellm
from tests.support.rows import each_row
from tests.unit.importer.test_import import COMMIT, accepted, imported, told

SECRET = "a-word-of-no-known-form"

CONFIG = f"""
model: Qwen/Qwen3-32B
revision: {COMMIT}
host: 0.0.0.0
port: 8001
uvicorn-log-level: info
tensor_parallel_size: 4
enable-expert-parallel: true
enable-eplb: true
trust-remote-code: false
max-model-len: 32k
enable-lora: true
lora-modules: [a=/a, b=/b]
compilation-config: {{cudagraph_mode: FULL}}
served-model-name: [chat]
api-key: {SECRET}
"""

LITELLM = f"""
model_list:
  - model_name: chat
    litellm_params:
      model: hosted_vllm/Qwen/Qwen3-32B
      api_base: http://gpu-01:8000/v1
      api_key: {SECRET}
      temperature: 0.2
      rpm: 60
  - model_name: chat
    litellm_params: {{model: hosted_vllm/Qwen/Qwen3-32B, api_base: http://gpu-02:8000/v1, temperature: 0.2}}
  - {{model_name: small, litellm_params: {{model: openai/org/small, api_base: http://gpu-03/v1}}}}
  - {{model_name: gpt-4o, litellm_params: {{model: openai/gpt-4o, api_key: os.environ/KEY}}}}
  - {{model_name: "qwen/*", litellm_params: {{model: "hosted_vllm/*"}}}}
router_settings:
  routing_strategy: least-busy
  model_group_alias: {{fast: small}}
  fallbacks: [{{small: [chat]}}]
general_settings: {{master_key: {SECRET}, database_url: "postgres://u:{SECRET}@db/x"}}
"""  # noqa: E501

KUBERNETES = f"""
apiVersion: v1
kind: Secret
metadata: {{name: hf-secret}}
stringData: {{token: {SECRET}}}
---
apiVersion: apps/v1
kind: Deployment
metadata: {{name: qwen, labels: {{app: qwen}}}}
spec:
  replicas: 3
  template:
    spec:
      nodeSelector: {{gpu: h100}}
      volumes:
        - {{name: models, hostPath: {{path: /srv/models}}}}
        - {{name: shm, emptyDir: {{medium: Memory}}}}
      containers:
        - name: vllm
          image: vllm/vllm-openai:v0.10.2
          command: [/usr/local/bin/vllm, serve]
          args: [/models/qwen3, --tensor-parallel-size, "2", --max-model-len, $(LENGTH), --seed=7]
          env:
            - {{name: LENGTH, value: "8192"}}
            - {{name: HF_TOKEN, valueFrom: {{secretKeyRef: {{name: hf-secret, key: token}}}}}}
            - {{name: DB_ADDRESS, valueFrom: {{secretKeyRef: {{name: db, key: url}}}}}}
            - {{name: POD_IP, valueFrom: {{fieldRef: {{fieldPath: status.podIP}}}}}}
            - {{name: MY_PASSWORD, value: {SECRET}}}
          envFrom: [{{secretRef: {{name: more}}}}]
          ports: [{{containerPort: 8000}}]
          resources: {{limits: {{nvidia.com/gpu: 2}}}}
          livenessProbe: {{httpGet: {{path: /health, port: 8000}}}}
          volumeMounts:
            - {{name: models, mountPath: /models}}
            - {{name: shm, mountPath: /dev/shm}}
        - {{name: sidecar, image: fluent-bit}}
"""

STACK = f"""
servingEngineSpec:
  runtimeClassName: ""
  vllmApiKey: {SECRET}
  modelSpec:
    - name: mistral
      repository: vllm/vllm-openai
      tag: v0.10.2
      modelURL: mistralai/Mistral-7B-Instruct-v0.2
      replicaCount: 2
      requestGPU: 1
      requestMemory: 32Gi
      pvcStorage: 50Gi
      enableTool: true
      toolCallParser: mistral
      hf_token: {SECRET}
      vllmConfig:
        enableChunkedPrefill: false
        maxModelLen: 4096
        tensorParallelSize: 2
        gpuMemoryUtilization: 0.8
        extraArgs: [--disable-log-requests, --seed, "7"]
      env:
        - {{name: NCCL_DEBUG, value: WARN}}
        - {{name: DB_ADDRESS, valueFrom: {{secretKeyRef: {{name: db, key: url}}}}}}
    - {{name: spare, enabled: false, repository: r, tag: latest, modelURL: org/spare}}
routerSpec: {{routingLogic: session}}
"""

RECIPE = f"""
recipe_version: "2"
model: Qwen/Qwen3-8B
model_revision: {COMMIT}
runtime: vllm-ray
container: nvcr.io/nvidia/vllm:25.09
min_nodes: 2
defaults: {{port: 8001, tensor_parallel: 2, gpu_memory_utilization: 0.9, tokens: 3}}
env: {{MY_PASSWORD: {SECRET}, NCCL_DEBUG: WARN}}
metadata: {{model_params: 8B}}
command: |
  vllm serve \\
      {{model}} \\
      --port {{port}} \\ 
      -tp {{tensor_parallel}} --gpu-memory-utilization {{gpu_memory_utilization}} \\
      --speculative-config '{{"method": "mtp", "num_speculative_tokens": {{tokens}}}}'
"""  # noqa: W291

HOSTS_INI = f"""
# the fleet
monitor-01 ansible_host=192.0.2.9

[gpu_h100]
gpu-[01:03].example.net
gpu-04:2222 ansible_host=192.0.2.4 rack="a 7"   # a note

[gpu_h100:vars]
ansible_user=deploy
ansible_become=yes
ansible_become_pass={SECRET}

[gpu:children]
gpu_h100

[all:vars]
ansible_user=root
ansible_ssh_private_key_file=~/.ssh/fleet
"""

HOSTS_YAML = f"""
all:
  vars: {{ansible_user: root, vault_token: {SECRET}}}
  hosts: {{monitor-01: {{ansible_host: 192.0.2.9}}}}
  children:
    gpu:
      vars: {{ansible_user: deploy}}
      children:
        gpu_h100:
          hosts:
            gpu-[01:02]: {{ansible_port: 2222}}
            gpu-03:
"""

SOURCES = {
    "config.yaml": CONFIG, "litellm.yaml": LITELLM, "manifests.yaml": KUBERNETES,
    "recipe.yaml": RECIPE, "values.yaml": STACK, "hosts.ini": HOSTS_INI, "hosts.yml": HOSTS_YAML,
}  # fmt: skip


def test_vllm_s_own_file_is_its_command_line() -> None:
    found = imported(CONFIG, "config.yaml")

    assert found.settings == {
        "vllm": {"api_key_file": "secrets/vllm-api-key"},
        "serving": {
            "model": {
                "model": "Qwen/Qwen3-32B", "revision": COMMIT, "served_name": "chat",
                "context": 32_000, "tensor_parallel": 4, "expert_parallel": True, "port": 8001,
                "adapters": {"a": {"source": "/a"}, "b": {"source": "/b"}},
                "flags": {
                    "compilation-config": {"cudagraph_mode": "FULL"}, "enable-eplb": True,
                    "trust-remote-code": False, "uvicorn-log-level": "info",
                },
            }
        },
    }  # fmt: skip
    assert accepted(found.settings).serving
    assert "`--host=0.0.0.0` is dropped" in told(found)


def test_false_in_vllm_s_file_switches_off_what_has_a_form_for_that() -> None:
    """A key with underscores is not found among the options."""
    found = imported(
        f"model: org/m\nrevision: {COMMIT}\nenable-prefix-caching: false\n"
        "enable_chunked_prefill: false\nenforce-eager: false\nquantization: null\n"
    )
    (one,) = found.settings["serving"].values()
    assert one["flags"] == {"enable-prefix-caching": False, "enforce-eager": False}
    assert "`enable_chunked_prefill: false` is dropped: vLLM reads nothing" in told(found)
    assert "`--quantization=None` is dropped, because it is the default of vLLM" in told(found)


def test_litellm_s_file_becomes_names_of_litellm() -> None:
    found = imported(LITELLM, "litellm.yaml")

    said = found.settings["litellm"]
    assert said == {
        "models": {
            "chat": {"entries": [], "parameters": {"temperature": 0.2}},
            "small": {"entries": [], "fallbacks": ["chat"]},
        },
        "aliases": {"fast": "small"},
    }
    assert "serving" not in found.settings
    Litellm.model_validate({"version": "1.1.0", "lock": "l", "allow_unauthenticated": True, **said})
    for key in ("api_base", "api_key", "rpm", "model_list[3] is left out", "qwen/*",
                "router_settings.routing_strategy", "general_settings"):  # fmt: skip
        assert key in told(found)
    assert any(
        "under `entries`, write the entries" in note.text for note in found.notes if note.decide
    )


def test_a_workload_of_kubernetes_becomes_a_server() -> None:
    found = imported(KUBERNETES, "manifests.yaml")

    assert found.settings == {
        "vllm": {"hf_token_file": "secrets/hf-token"},
        "serving": {
            "qwen": {
                "model": "/srv/models/qwen3", "served_name": "/models/qwen3", "replicas": 3,
                "context": 8192, "tensor_parallel": 2, "flags": {"seed": 7},
                "environment": {"LENGTH": "8192"},
                "environment_files": {
                    "DB_ADDRESS": "secrets/qwen-db-address",
                    "MY_PASSWORD": "secrets/qwen-my-password",
                },
            }
        },
    }  # fmt: skip
    assert accepted(found.settings).serving
    for said in ("Secret `hf-secret` is not a kind of workload that gpufleet imports",
                 "key `token` of the Secret `hf-secret`",
                 "POD_IP is dropped", "`envFrom` secretRef `more`", "v0.10.2", "`nodeSelector`",
                 "container `sidecar`", "`livenessProbe`", "the volume `shm`"):  # fmt: skip
        assert said in told(found)


@each_row(
    "container",
    [
        "{image: vllm/vllm-openai, args: [--model, org/m, --seed=7]}",
        "{image: x, command: [vllm, serve, org/m, --seed, '7']}",
        "{image: x, command: [/bin/sh, -c], args: ['exec vllm serve org/m --seed 7']}",
        "{image: vllm/vllm-openai, args: ['$(M)', --seed=7], env: [{name: M, value: org/m}]}",
        "{image: x, command: [python3, -m, vllm.entrypoints.openai.api_server],"
        " args: [--model=org/m, --seed=7]}",
    ],
)
def test_every_way_to_start_a_container_means_the_same(container: str) -> None:
    pod = (
        f"{{apiVersion: v1, kind: Pod, metadata: {{name: a}}, spec: {{containers: [{container}]}}}}"
    )
    listed = f"{{apiVersion: v1, kind: List, items: [{pod}]}}"
    for text in (pod, listed):
        (one,) = imported(text, "pod.yaml").settings["serving"].values()
        assert (one["model"], one["flags"]) == ("org/m", {"seed": 7})


def test_the_leader_of_a_group_of_pods_is_the_server() -> None:
    leader = "{spec: {containers: [{image: vllm/vllm-openai, args: [org/m, -tp=8, -pp=2]}]}}"
    found = imported(
        "{apiVersion: leaderworkerset.x-k8s.io/v1, kind: LeaderWorkerSet, metadata: {name: a}, "
        f"spec: {{replicas: 2, leaderWorkerTemplate: {{size: 2, leaderTemplate: {leader}}}}}}}"
    )
    (one,) = found.settings["serving"].values()
    assert (one["replicas"], one["tensor_parallel"], one["pipeline_parallel"]) == (2, 8, 2)
    assert any("has 2 Pods in this file" in note.text for note in found.notes if note.decide)


def test_a_refusal_names_what_was_left_out() -> None:
    with pytest.raises(
        FleetError,
        match="Service `a` is not a kind of workload that gpufleet imports, so it is left out",
    ):
        imported("{apiVersion: v1, kind: Service, metadata: {name: a}}", "service.yaml")


def test_values_of_the_production_stack_become_servers() -> None:
    found = imported(STACK, "values.yaml")

    assert found.settings == {
        "vllm": {
            "api_key_file": "secrets/vllm-api-key", "hf_token_file": "secrets/hf-token",
        },
        "serving": {
            "mistral": {
                "model": "mistralai/Mistral-7B-Instruct-v0.2", "revision": None,
                "served_name": "mistralai/Mistral-7B-Instruct-v0.2", "replicas": 2,
                "context": 4096, "tensor_parallel": 2,
                "flags": {
                    "enable-auto-tool-choice": True, "enable-chunked-prefill": False,
                    "enable-log-requests": False, "enable-prefix-caching": False,
                    "gpu-memory-utilization": 0.8, "seed": 7, "tool-call-parser": "mistral",
                },
                "environment": {"NCCL_DEBUG": "WARN"},
                "environment_files": {"DB_ADDRESS": "secrets/mistral-db-address"},
            }
        },
    }  # fmt: skip
    assert accepted(found.settings).serving
    for said in (
        "`requestGPU`",
        "`pvcStorage`",
        "modelSpec `spare` is not enabled",
        "`routerSpec`",
    ):
        assert said in told(found)


def test_a_recipe_of_sparkrun_becomes_a_server() -> None:
    found = imported(RECIPE, "recipe.yaml")

    (one,) = found.settings["serving"].values()
    assert one == {
        "model": "Qwen/Qwen3-8B", "revision": COMMIT, "served_name": "Qwen/Qwen3-8B",
        "tensor_parallel": 2, "distributed_executor_backend": "ray", "port": 8001,
        "flags": {
            "gpu-memory-utilization": 0.9,
            "speculative-config": {"method": "mtp", "num_speculative_tokens": 3},
        },
        "environment": {"NCCL_DEBUG": "WARN"},
        "environment_files": {"MY_PASSWORD": "secrets/model-my-password"},
    }  # fmt: skip
    assert accepted(found.settings).serving
    for said in ("`metadata`", "wants several nodes", "line 3 has text after"):
        assert said in told(found)


def test_a_recipe_without_a_command_is_read_from_its_defaults() -> None:
    found = imported(
        "{model: org/m, runtime: vllm, container: x, defaults: {tensor_parallel: 2, "
        "max_model_len: 4096, enforce_eager: true, trust_remote_code: false, unknown_knob: 3}}"
    )
    (one,) = found.settings["serving"].values()
    assert (one["tensor_parallel"], one["context"]) == (2, 4096)
    assert one["flags"] == {"enforce-eager": True}
    assert "`--unknown-knob 3`" in told(found)
    assert "`trust_remote_code: false` is dropped" in told(found)


@pytest.mark.parametrize(
    ("name", "text", "groups", "nodes"),
    [
        (
            "hosts.ini", HOSTS_INI,
            {"gpu_h100": 4, "gpu": 4, "ungrouped": 1},
            {"gpu-02.example.net": {"ssh_user": "deploy", "ssh_key": "~/.ssh/fleet", "_sudo": True},
             "gpu-04": {"ssh_hostname": "192.0.2.4", "ssh_port": 2222, "ssh_user": "deploy"},
             "monitor-01": {"ssh_hostname": "192.0.2.9", "ssh_user": "root"}},
        ),
        (
            "hosts.yml", HOSTS_YAML,
            {"gpu_h100": 3, "gpu": 3, "ungrouped": 1},
            {"gpu-02": {"ssh_port": 2222, "ssh_user": "deploy"},
             "gpu-03": {"ssh_user": "deploy"},
             "monitor-01": {"ssh_hostname": "192.0.2.9", "ssh_user": "root"}},
        ),
    ],
)  # fmt: skip
def test_an_inventory_of_ansible_becomes_an_inventory_file(
    name: str, text: str, groups: dict[str, int], nodes: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    target = tmp_path / "inventories/prod.py"
    run = CliRunner().invoke(
        import_, [str(tmp_path / name), "-o", str(target)], standalone_mode=False
    )
    assert run.exception is None
    assert target.is_file()

    fleet = loader.read(target)
    assert {group: len(members) for group, members in fleet.groups.members.items()} == groups
    for node, wanted in nodes.items():
        data = fleet.nodes[node].for_pyinfra(fleet.root)
        assert {key: data[key] for key in wanted} == wanted | (
            {"ssh_key": data["ssh_key"]} if "ssh_key" in wanted else {}
        )
    assert "ssh-keyscan" in run.stderr
    assert "vllm" not in run.stderr.lower()


@each_row("name", SOURCES)
def test_no_secret_of_a_source_is_in_what_comes_out(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(SOURCES[name])
    run = CliRunner().invoke(import_, [str(tmp_path / name)], standalone_mode=False)

    assert run.exception is None
    assert SECRET in SOURCES[name]
    assert run.stdout
    assert SECRET not in run.stdout + run.stderr


@each_row("name", SOURCES)
def test_a_kind_is_known_by_its_content(name: str) -> None:
    """Whatever the file is called, also where it has no name."""
    assert read(SOURCES[name], "-", "model") == read(SOURCES[name], "given.txt", "model")


DOUBLED = ", ".join(
    ["{name: A0, value: xxxxxxxx}"]
    + [f"{{name: A{n}, value: '$(A{n - 1})$(A{n - 1})'}}" for n in range(1, 60)]
)


@each_row(
    ("text", "said"),
    [
        ("plain: 1\nother: {a: b}\n", "which is not a known format; gpufleet can read:"),
        ("k" * 900 + ": 1\n", "which is not a known format"),
        ("{apiVersion: v1, kind: Pod, spec: 3}", "the file does not start vLLM"),
        ("{apiVersion: v1, kind: List, items: {a: b}}", "the file does not start vLLM"),
        ("servingEngineSpec: [x]", "the file does not start vLLM"),
        ("servingEngineSpec: {modelSpec: {a: b}}", "the file does not start vLLM"),
        ("model_list: 3", "the file does not start vLLM"),
        ("model_list: [3, [x], {litellm_params: 7}]", "the file does not start vLLM"),
        ("all: {hosts: [a, b]}", "groups but no hosts:"),
        ("all: {hosts: {'gpu-[1:999999999]': }}", "more than 10,000 hosts"),
        ("all: {hosts: {'gpu-[5:1]': }}", "not a range of hosts"),
        (f"all: {{hosts: {{'{'[1:1]' * 150}': }}}}", "more than 8 ranges"),
        ("a: {children: {b: {children: {a: }}}, hosts: {x: }}", "contain each other"),
        ("{? {a: b} : c}", "line 1: a name is a mapping or a list"),
        ("{apiVersion: v1, kind: Pod, spec: {containers: [{image: vllm, args: ['$(A59)'], "
         f"env: [{DOUBLED}]}}]}}}}", "the variables of the script expand to more than"),
        ("--- a\n--- b\n", "the file does not start vLLM"),
        ("a: &a {hosts: *a}", "aliases"),
        ("{model: m, runtime: sglang, defaults: {port: 1}}", "the runtime sglang"),
        ("{model: m, runtime: vllm, command: echo hello}", "has no `vllm serve`"),
        ("{model: m, runtime: vllm, command: '{a}', defaults: {a: '{b}{b}{b}{b}{b}{b}{b}{b}', "
         "b: '{a}{a}{a}{a}{a}{a}{a}{a}'}}", "has more than"),
        ("all: " + "{children: {g: " * 400 + "}}" * 400, "nested too deeply|groups and no hosts"),
    ],
)  # fmt: skip
def test_hostile_yaml_ends_in_a_sentence_at_once(text: str, said: str) -> None:
    began = time.process_time()
    with pytest.raises(FleetError, match=said) as refused:
        imported(text, "given.yml")

    assert time.process_time() - began < 2
    assert len(str(refused.value)) < 1000


def test_hostile_ini_ends_in_a_sentence() -> None:
    many = "\n".join(f"[g{n}]\nh{n}" for n in range(3000))
    with pytest.raises(FleetError, match="more than 1,000 groups"):
        imported(many, "hosts.ini")
    with pytest.raises(FleetError, match="line 2: a closing quote is missing"):
        imported(f"[a]\nhost x='{SECRET}\n", "hosts.ini")


VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda below: (
        st.lists(below, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    *("hosts", "children", "vars", "kind", "apiVersion", "spec", "template"),
                    *("containers", "image", "args", "command", "env", "name", "valueFrom"),
                    *("secretKeyRef", "modelSpec", "vllmConfig", "model_list", "litellm_params"),
                    *("model", "services", "models", "servingEngineSpec", "hf_token", "items"),
                    *(
                        "runtime",
                        "defaults",
                        "container",
                        "router_settings",
                        "fallbacks",
                        "model_group_alias",
                        "extraArgs",
                        "port",
                    ),
                ]
            ),
            below,
            max_size=4,
        )
    ),
    max_leaves=12,
)
TOPS = ["all", "apiVersion", "kind", "spec", "servingEngineSpec", "model_list", "model", "services"]


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from([*TOPS, "models", "items"]), VALUES, max_size=4))
def test_values_of_any_type_end_in_settings_or_in_a_sentence(document: dict[str, Any]) -> None:
    text = yaml.safe_dump(document)
    try:
        imported(text, "given.yml")
    except FleetError:
        return

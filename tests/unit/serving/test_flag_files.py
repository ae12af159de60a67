"""Files that settings name are looked for on the nodes before a deploy touches one of them."""

import json
from types import SimpleNamespace

import pytest

from gpufleet.errors import FleetError
from gpufleet.fleet import assessment, model_configs
from gpufleet.fleet.declared_hardware import with_identity
from gpufleet.on_node.common import linux_facts, stages
from gpufleet.on_node.common.answers import read
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.variables import Origin
from tests.support.checkout import ROOT
from tests.support.rows import each_row

QWEN = json.loads((ROOT / "tests/data/models/Qwen--Qwen3-32B.json").read_text())["config"]
VLLM = {
    "version": "0.32.0",
    "lock": "locks/none.txt",
    "listen": "127.0.0.1",
    "allow_unguarded_ports": True,
}
MACHINE = json.loads((ROOT / "src/gpufleet/catalog/data/nodes/h100x8.json").read_text())
ABSENT = {"missing": "absent"}


@pytest.fixture
def node(tmp_path, monkeypatch):
    """Return a node's root with a model, a template and the probe's look at declared paths."""
    (tmp_path / "srv/q").mkdir(parents=True)
    (tmp_path / "srv/q/config.json").write_text(json.dumps(QWEN))
    (tmp_path / "srv/Qwen3-32B").symlink_to("q")
    (tmp_path / "srv/chat.jinja").write_text("{{ messages }}")
    monkeypatch.setattr(linux_facts, "ROOT", str(tmp_path))
    return tmp_path


def machine(name):
    """Return what the probe of a node finds, with an address of its own."""
    found = with_identity(MACHINE, name)
    for card in found["nics"]["net"]:
        if card["name"] == found["nics"]["default_route"]:
            address = f"10.10.0.{ord(name)}"
            card |= {"ipv4": address, "networks": [f"{address}/24"]}
    return found


def plan(node, flags, model="/srv/q", nodes=("a",), absent=(), **more):
    """Return the plan of a fleet whose probes looked at the node's root; `absent` have no files."""
    served = {
        "model": model,
        "context": 8192,
        "flags": flags,
        "replicas": len(nodes),
        "tensor_parallel": 8,
        **more,
    }
    settings = NodeSettings.model_validate({"vllm": VLLM, "serving": {"q": served}})
    where = Origin("group_vars/all.yml", 7)
    declared = {
        name: SimpleNamespace(groups=(), settings=settings, origins={"serving": where})
        for name in nodes
    }
    asked = model_configs.probe_paths(declared)
    documents = {
        name: {
            **machine(name),
            "models": {path: read(stages.model, path) for path in asked[name].models},
            "files": {
                path: ABSENT if name in absent else read(stages.named_file, path)
                for path in asked[name].files
            },
        }
        for name in nodes
    }
    return assessment.plan_fleet(documents, declared, models_folder=node / "srv")


@each_row(
    ("flag", "value", "path"),
    [
        ("chat-template", "/srv/none.jinja", "/srv/none.jinja"),
        ("tool-parser-plugin", "/srv/parser.py", "/srv/parser.py"),
        ("tokenizer", "/srv/tokenizer", "/srv/tokenizer"),
        ("lora-modules", ["sql=/srv/lora/sql"], "/srv/lora/sql"),
        ("lora-modules", ['{"name": "sql", "path": "/srv/lora/sql"}'], "/srv/lora/sql"),
        ("generation-config", "/srv/generation", "/srv/generation"),
    ],
)
def test_a_file_that_is_not_on_the_node_is_refused_with_its_key(node, flag, value, path):
    more = {"enable-lora": True} if flag == "lora-modules" else {}
    with pytest.raises(FleetError) as refused:
        plan(node, {flag: value, **more})

    text = str(refused.value)
    assert f"group_vars/all.yml:7: serving.q.flags.{flag}: {path} does not exist on a," in text
    assert "create it there, or write a path" in text


def test_what_is_there_is_not_remarked_on(node):
    (node / "srv/tokenizer").mkdir()

    found = plan(node, {"chat-template": "/srv/chat.jinja", "tokenizer": "/srv/tokenizer"})

    assert not [each for each in found.remarks if "/srv/" in each]


def test_the_text_of_a_template_is_no_path(node):
    plan(node, {"chat-template": "/{{ messages }}"})


def test_a_template_that_is_a_directory_is_refused(node):
    (node / "srv/templates").mkdir()

    with pytest.raises(FleetError, match="/srv/templates is a directory, not a file on a"):
        plan(node, {"chat-template": "/srv/templates"})


def test_each_node_is_named_that_lacks_it(node):
    with pytest.raises(FleetError, match=r"/srv/chat\.jinja does not exist on b, c,"):
        plan(node, {"chat-template": "/srv/chat.jinja"}, nodes=("a", "b", "c"), absent=("b", "c"))


def test_a_path_that_the_probe_may_not_see_is_not_taken_for_absent(node, monkeypatch):
    real = stages.named_file

    def look(path):
        if path == "/srv/secret/chat.jinja":
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(stages, "named_file", look)
    found = plan(node, {"chat-template": "/srv/secret/chat.jinja"})

    (remark,) = (each for each in found.remarks if "/srv/secret" in each)
    assert "could not be checked (no_permission) on a" in remark


def test_a_model_that_only_another_node_has_is_refused(node):
    served = {"model": "/srv/q", "context": 8192, "replicas": 2, "tensor_parallel": 8}
    settings = NodeSettings.model_validate({"vllm": VLLM, "serving": {"q": served}})
    declared = {
        name: SimpleNamespace(groups=(), settings=settings, origins={}) for name in ("a", "b")
    }
    documents = {
        name: {**with_identity(MACHINE, name), "models": {"/srv/q": read(stages.model, path)}}
        for name, path in (("a", "/srv/q"), ("b", "/srv/none"))
    }

    with pytest.raises(FleetError, match=r"serving\.q\.model: /srv/q does not exist on b"):
        assessment.plan_fleet(documents, declared)


SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def shard(size=64):
    """Return a safetensors file of one tensor of so many bytes."""
    header = json.dumps({"t": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(size)


def with_weights(folder):
    for name in SHARDS:
        (folder / name).write_bytes(shard())
    index = {"weight_map": {f"layers.{n}.w": name for n, name in enumerate(SHARDS)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def cut(folder):
    (folder / SHARDS[1]).write_bytes(shard()[:-1])


def lose(folder):
    (folder / SHARDS[1]).unlink()


def point(folder):
    (folder / SHARDS[1]).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")


@each_row(
    ("damage", "why"),
    [
        (cut, f"{SHARDS[1]}: cut off, or not a safetensors file"),
        (lose, f"{SHARDS[1]}: missing"),
        (point, f"{SHARDS[1]}: cut off, or not a safetensors file"),
    ],
)
def test_weights_that_cannot_be_loaded_are_refused_before_a_server_starts(node, damage, why):
    folder = with_weights(node / "srv/q")
    plan(node, {})

    damage(folder)

    with pytest.raises(FleetError) as refused:
        plan(node, {})
    assert f"/srv/q has weights that cannot be loaded ({why}) on a," in str(refused.value)
    plan(node, {"load-format": "gguf"})  # which reads none of them


def test_a_mark_of_a_download_is_not_believed_where_weights_are_lost(node):
    """Without the mark a deploy downloads what is missing: nothing is refused."""
    hub = {"model": "Qwen/Qwen3-32B", "revision": "0" * 40}
    folder = node / f"var/lib/vllm/models/Qwen--Qwen3-32B/{hub['revision']}"
    folder.mkdir(parents=True)
    lose(with_weights(folder))
    plan(node, {}, **hub)

    (folder / ".complete").touch()

    with pytest.raises(FleetError) as refused:
        plan(node, {}, **hub)
    assert f"({SHARDS[1]}: missing)" in str(refused.value)
    assert f"{hub['revision']}/.complete on that node, and run a deploy" in str(refused.value)


OVER_NODES = {"replicas": 1, "pipeline_parallel": 2, "span_nodes": True}


def test_the_server_alone_reads_a_template_and_each_rank_the_tokenizer(node):
    """Of a replica over two nodes the first one has the server."""
    (node / "srv/tokenizer").mkdir()
    template = {"chat-template": "/srv/chat.jinja"}

    plan(node, template, nodes=("a", "b"), absent=("b",), **OVER_NODES)
    with pytest.raises(FleetError, match=r"/srv/chat\.jinja does not exist on a,"):
        plan(node, template, nodes=("a", "b"), absent=("a",), **OVER_NODES)
    with pytest.raises(FleetError, match=r"/srv/tokenizer does not exist on b,"):
        plan(node, {"tokenizer": "/srv/tokenizer"}, nodes=("a", "b"), absent=("b",), **OVER_NODES)

"""
What the plan's command lines are told by the release that will run them.

Sentences are checked for what an operator needs of them: the key, its line, the release, and what
to write. That a verdict is the real parser's is another test's business (tests/flags).
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import yaml

from gpufleet.engines.vllm.launch_arguments import lines
from gpufleet.errors import FleetError
from gpufleet.flags import schema
from gpufleet.planning.stage import Stage
from gpufleet.serving import flag_check
from gpufleet.serving.unit import render_unit
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.serving_settings import OLDEST_VLLM, Served, Vllm
from gpufleet.settings.variables import Origin
from tests.support.rows import each_row

STAGE = Stage(
    model="llama",
    replica=0,
    node="gpu-01",
    gpus=(2, 3),
    gpu_uuids=("GPU-5f1c", "GPU-9a2e"),
    port=8000,
    tensor_parallel=2,
)
OTHER = replace(STAGE, replica=1, node="gpu-02", port=8001)
SUPPORTED = [one for one in schema.versions() if schema.sort_key(one) >= OLDEST_VLLM]


def node(version="0.32.0", *, flags=None, environment=None, shared=None, device="cuda"):
    return NodeSettings(
        vllm=Vllm(
            version=version,
            lock="locks/vllm.txt",
            listen="127.0.0.1",
            environment=shared or {},
            device=device,
        ),
        serving={
            "llama": Served(
                model="/srv/llama",
                tensor_parallel=2,
                flags=flags or {},
                environment=environment or {},
            )
        },
    )


def judged(settings, origins=None):
    """The sentences of a refusal, and the remarks."""
    try:
        remarks = flag_check.check_plan(
            (STAGE, OTHER), {"gpu-01": settings, "gpu-02": settings}, origins
        )
    except FleetError as error:
        return error.problems, ()
    return (), remarks


@each_row("version", SUPPORTED)
@each_row("device", ["cuda", "cpu"])
def test_what_we_add_ourselves_is_known_to_every_release_that_may_be_declared(version, device):
    """An operator could not put right what we write: no release refuses it or remarks on it."""
    assert judged(node(version, device=device)) == ((), ())


@each_row("version", SUPPORTED)
def test_a_switch_that_is_off_is_spelt_as_every_release_takes_it(version):
    """0.33 hides the form --no-x from its help; an operator wrote `false` and is told nothing."""
    assert judged(node(version, flags={"enable-prefix-caching": False})) == ((), ())


def test_a_removed_flag_is_refused_with_its_key_its_line_the_release_and_what_replaces_it():
    origins = {
        name: {
            "serving": Origin(
                "group_vars/gpu.yml", 3, {("llama",): 4, ("llama", "flags", "swap-space"): 17}
            )
        }
        for name in ("gpu-01", "gpu-02")
    }
    refused, _ = judged(node(flags={"swap-space": 4}), origins)
    assert len(refused) == 1, "two stages of one model, and one line to put right"
    (sentence,) = refused
    assert sentence.startswith("group_vars/gpu.yml:17: serving.llama.flags.swap-space: ")
    for said in ("0.32.0", "since 0.18.0", "remove it", "--kv-offloading-size"):
        assert said in sentence


def test_a_flag_that_we_also_give_is_named_by_the_operators_key_alone():
    """With a key every server gets our guard as one more `--middleware`."""
    mine = node(flags={"middleware": "auth"})
    with_key = mine.model_copy(
        update={"vllm": mine.vllm.model_copy(update={"api_key_file": "secrets/key"})}
    )
    (sentence,), _ = judged(with_key)
    assert sentence.startswith("serving.llama.flags.middleware: `--middleware` must be a class")


def test_everything_is_refused_at_once():
    refused, _ = judged(
        node(
            flags={"swap-space": 4, "max-model-len": "lots"},
            environment={"VLLM_ATTENTION_BACKEND": "FLASHINFER"},
            shared={"VLLM_USE_V1": "1"},
        )
    )
    keys = {sentence.split(":")[0] for sentence in refused}
    assert keys == {
        "serving.llama.flags.swap-space",
        "serving.llama.flags.max-model-len",
        "serving.llama.environment.VLLM_ATTENTION_BACKEND",
        "vllm.environment.VLLM_USE_V1",
    }


def test_a_model_s_variable_goes_before_the_shared_one_of_the_same_name():
    refused, _ = judged(node(environment={"VLLM_USE_V1": "0"}, shared={"VLLM_USE_V1": "1"}))
    assert [sentence.split(":")[0] for sentence in refused] == [
        "serving.llama.environment.VLLM_USE_V1"
    ]


def test_what_only_calls_for_a_remark_stops_nothing_and_is_said_once():
    refused, remarks = judged(node("0.33.0", flags={"quantization": "fp8"}))
    assert refused == ()
    assert len(remarks) == 1
    assert "serving.llama.flags.quantization" in remarks[0]


def test_a_release_that_is_not_packaged_is_never_judged_by_its_neighbours():
    """0.32.0 would refuse this argument; of 99.0.0 we know nothing, and say who will be asked."""
    refused, remarks = judged(node("99.0.0", flags={"swap-space": 4}))
    assert refused == ()
    assert len(remarks) == 1
    assert "99.0.0" in remarks[0]
    assert "checks them before any restart" in remarks[0]


def test_what_is_judged_is_what_the_unit_says():
    settings = node(flags={"enforce-eager": True, "seed": None, "max-num-seqs": 8})
    model, vllm = settings.serving["llama"], settings.vllm
    begun = flag_check.launch_command(STAGE, model, vllm, release="0.32.0-1a2b3c4d5e")
    unit = render_unit(STAGE, model, vllm, release="0.32.0-1a2b3c4d5e").content
    command = unit.split("/bin/vllm serve \\\n")[1].split("\n\n")[0]
    assert tuple(command.replace("\\\n", " ").split()) == begun.argv
    for name, value in begun.environment.items():
        assert f"Environment={name}={value}\n" in unit


def test_a_variable_of_ours_that_a_release_does_not_read_is_no_operator_s_business():
    known = schema.load("0.33.0")
    others = {name: each for name, each in known.environment.items() if "RPC_BASE" not in name}
    settings = node("0.33.0")
    begun = flag_check.launch_command(STAGE, settings.serving["llama"], settings.vllm, release="x")
    assert "VLLM_RPC_BASE_PATH" in begun.environment
    found = flag_check.check_stage(replace(known, environment=others), begun)
    assert found == flag_check.FlagFindings()


def test_each_word_leads_back_to_the_setting_that_it_comes_from():
    settings = node(flags={"max-num-seqs": 8})
    begun = flag_check.launch_command(STAGE, settings.serving["llama"], settings.vllm, release="x")
    keys = {word: ".".join(map(str, key)) for word, key in zip(begun.argv, begun.keys, strict=True)}
    assert keys["/srv/llama"] == "serving.llama.model"
    assert keys["--host"] == "vllm.listen"
    assert keys["--tensor-parallel-size"] == "serving.llama.tensor_parallel"
    assert keys["--max-num-seqs"] == keys["8"] == "serving.llama.flags.max-num-seqs"


def test_an_argument_that_a_process_cannot_be_given_is_refused_while_planning():
    refused, _ = judged(node(flags={"middleware": []}))
    assert len(refused) == 1
    assert "serving.llama.flags.middleware is an empty list" in refused[0]


def test_a_name_that_only_this_release_lacks_is_named_with_what_it_has_instead():
    """No table knows of a release that is not packaged: its own names are what there is."""
    known = schema.load("0.33.0")
    flags = tuple(
        replace(flag, name="--force-eager", aliases=(), negations=(), hidden=())
        if flag.name == "--enforce-eager"
        else flag
        for flag in known.flags
    )
    settings = node("99.0.0", flags={"enforce-eager": True})
    begun = flag_check.launch_command(STAGE, settings.serving["llama"], settings.vllm, release="x")
    found = flag_check.check_stage(replace(known, version="99.0.0", flags=flags), begun)
    assert len(found.refused) == 1
    assert "serving.llama.flags.enforce-eager" in found.refused[0]
    assert "`--force-eager`" in found.refused[0]


@each_row(
    "words",
    [
        ("--kv-cache-dtype", "fp8"),
        ("--enforce-eager",),
        ("--no-enable-prefix-caching",),
        ("--block-size=-1",),
        ("--served", "a b", "yes", "007", "1.50", "0.5", "0x1f", "2026-01-01", "it's", "", ".inf"),
        ("--served", "1e5", "1_000", "0", "~", "=", "a:b", "#", "64M", "[a]", "1:30", "null"),
        ("--speculative-config", '{"method":"ngram","n":3}'),
        ("--a", "x", "--no-b", "--c"),
        ("--structured-outputs-config.backend", "xgrammar"),
    ],
)
def test_what_is_to_be_written_instead_gives_these_very_arguments(words):
    """The settings that a sentence proposes are read back by YAML and made a command line again."""
    proposed = flag_check.as_settings(words)
    arguments = {}
    for line in proposed.strip("`").split("` and `"):
        arguments |= yaml.safe_load(line)
    model = Served(model="/srv/llama", flags={})
    made = [
        word
        for _, line in lines(STAGE, model.model_copy(update={"flags": arguments}), node().vllm)[6:]
        for word in line
    ]
    expected = [part for word in words for part in ([word] if "=-" in word else word.split("\0"))]
    assert sorted(made) == sorted(expected), json.dumps(arguments)


def test_what_a_person_alone_can_rewrite_is_not_made_up():
    assert flag_check.as_settings(()) == ""
    assert flag_check.as_settings(("-O3",)) == "`-O3`"


def test_every_module_that_is_said_not_to_judge_exists() -> None:
    """A name that stays behind after a rename would hide a module of that name from `judge_id`."""
    there = {path.stem for path in Path(schema.__file__).parent.glob("*.py")}
    assert there >= flag_check._NOT_JUDGING

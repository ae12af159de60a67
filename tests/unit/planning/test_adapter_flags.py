"""What a plan makes of `adapters`: flags with ranks that vLLM knows, memory that is counted."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from gpufleet.errors import FleetError
from gpufleet.flags import schema
from gpufleet.flags.check import check
from gpufleet.fleet import assessment
from gpufleet.planning.adapter_flags import remarks
from gpufleet.serving import unit
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.serving_settings import Served
from gpufleet.sizing.adapter_config import parse_adapter
from tests.support.checkout import ROOT

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ABSENT = {"missing": "absent"}
LORA = {"peft_type": "LORA", "r": 16, "lora_alpha": 32, "target_modules": ["q_proj"]}


def recorded(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / f"tests/data/models/{name}.json").read_text())
    return found["config"]  # type: ignore[no-any-return]


class Fleet:
    """One recorded node on which a model and adapters lie, at paths."""

    def __init__(self, model: str = "Qwen--Qwen3-32B") -> None:
        path = ROOT / "src/gpufleet/catalog/data/nodes/h100x8.json"
        self.document = json.loads(path.read_text())
        self.document["models"] = {"/srv/q": self.files(config=recorded(model))}
        self.served: dict[str, Any] = {"model": "/srv/q", "context": 8192, "adapters": {}}
        self.vllm = {"version": "0.32.0", "lock": "locks/none.txt", "listen": "127.0.0.1"}

    @staticmethod
    def files(**files: Any) -> dict[str, Any]:
        return (
            dict.fromkeys(("config", "hf_quant_config", "adapter_config", "bytes"), ABSENT) | files
        )

    def add(self, name: str, config: Any = None, **more: Any) -> None:
        """Declare an adapter at a path; `config` is what its file says there."""
        self.served["adapters"][name] = {"source": f"/srv/adapters/{name}", **more}
        if config is not None:
            self.document["models"][f"/srv/adapters/{name}"] = self.files(adapter_config=config)

    def settings(self) -> NodeSettings:
        return NodeSettings.model_validate({"vllm": self.vllm, "serving": {"q": self.served}})

    def plan(self) -> assessment.Assessment:
        declared = {"a": SimpleNamespace(groups=(), settings=self.settings(), origins={})}
        return assessment.plan_fleet({"a": self.document}, declared)  # type: ignore[arg-type]

    def lines(self) -> list[str]:
        """Return the arguments of the planned unit, one flag a line."""
        (stage,) = self.plan().plan.stages
        here = self.settings()
        assert here.vllm
        return unit.argument_lines(stage, here.serving["q"], here.vllm)

    def refusal(self) -> str:
        with pytest.raises(FleetError) as refused:
            self.plan()
        return str(refused.value)


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


@pytest.mark.parametrize(
    ("ranks", "flag"),
    [((1,), 1), ((2,), 8), ((8,), 8), ((16, 9), 16), ((65, 8), 128), ((512,), 512)],
)
def test_the_rank_is_the_smallest_that_vllm_knows_for_all(
    fleet: Fleet, ranks: tuple[int, ...], flag: int
) -> None:
    for number, rank in enumerate(ranks):
        fleet.add(f"a{number}", {**LORA, "r": rank})

    assert f"--max-lora-rank {flag}" in fleet.lines()


def test_a_rank_of_single_modules_counts_too(fleet: Fleet) -> None:
    fleet.add("sql", {**LORA, "rank_pattern": {"q_proj": 40}})

    assert "--max-lora-rank 64" in fleet.lines()


def test_a_unit_names_every_adapter_with_a_path_that_tells_its_content(fleet: Fleet) -> None:
    fleet.add("sql", LORA)
    fleet.add("chat", LORA, sha256="ab" * 32)

    lines = fleet.lines()

    copy = f"/var/lib/vllm/models/adapters/{'ab' * 32}"
    assert f"--lora-modules chat={copy} sql=/srv/adapters/sql" in lines
    assert "--enable-lora" in lines
    # Every word is one that vLLM's parser takes.
    words = ["/srv/q", *(word for line in lines[1:] for word in line.split(" "))]
    assert not [each for each in check(schema.load("0.32.0"), words, {}) if each.refuses]


def test_places_in_a_batch_are_bounded_and_no_adapter_is_read_twice(fleet: Fleet) -> None:
    for number in range(3):
        fleet.add(f"a{number}", LORA)
    few = fleet.lines()
    for number in range(3, 7):
        fleet.add(f"a{number}", LORA)
    many = fleet.lines()

    assert "--max-loras 3" in few
    assert not any(line.startswith("--max-cpu-loras") for line in few)
    assert {"--max-loras 4", "--max-cpu-loras 7"} <= {*many}


def test_numbers_of_operators_and_presets_win(fleet: Fleet) -> None:
    fleet.add("sql", LORA)
    fleet.served |= {"presets": ["multi-lora"], "flags": {"max-lora-rank": 64}}

    lines = fleet.lines()

    assert {"--max-lora-rank 64", "--max-loras 4", "--max-cpu-loras 32"} <= {*lines}


def test_adapters_take_memory_that_the_plan_counts(fleet: Fleet) -> None:
    fleet.served["tensor_parallel"] = 2

    def tokens() -> int:
        (row,) = fleet.plan().as_json()["candidates"]
        return int(row["kv_cache_tokens"])

    bare = tokens()
    for number in range(4):
        fleet.add(f"a{number}", {**LORA, "r": 16})
    small = tokens()
    for number in range(4):
        fleet.add(f"a{number}", {**LORA, "r": 256})

    assert bare > small > tokens()


@pytest.mark.parametrize(
    ("config", "flags", "says"),
    [
        (
            {**LORA, "r": 513},
            {},
            "adapters.sql: the adapter's rank is 513, but vLLM allows at most 512",
        ),
        (
            LORA,
            {"max-lora-rank": 8},
            "flags.max-lora-rank: the value is 8, but the adapter sql has rank 16",
        ),
        ({**LORA, "use_dora": True}, {"max-lora-rank": 8}, "has `use_dora`"),
        ({**LORA, "bias": "all"}, {}, "has biases"),
        ({**LORA, "lora_bias": True}, {}, "has biases"),
        ({**LORA, "modules_to_save": ["lm_head"]}, {}, "does not load full modules"),
        ({**LORA, "peft_type": "IA3"}, {}, "has `peft_type` 'IA3'"),
        ({**LORA, "r": "16"}, {}, "has no rank: `r` is '16'"),
        ({**LORA, "r": True}, {}, "has no rank"),
        ({**LORA, "r": 0}, {}, "has no rank"),
        ({**LORA, "rank_pattern": {"a": "b"}}, {}, "`rank_pattern`"),
        ({**LORA, "rank_pattern": [1]}, {}, "`rank_pattern`"),
        ({}, {}, "has no rank"),
        (
            ABSENT,
            {},
            "does not know the adapter's rank: /srv/adapters/sql: adapter_config.json in this",
        ),
        ([1], {}, "does not know the adapter's rank"),
        (
            None,
            {},
            "know the adapter's rank: /srv/adapters/sql: adapter_config.json in this dir",
        ),
    ],
)
def test_what_no_server_would_load_is_refused_with_its_key(
    fleet: Fleet, config: Any, flags: dict[str, Any], says: str
) -> None:
    fleet.add("sql", config)
    fleet.served["flags"] = flags

    said = fleet.refusal()

    assert says in said
    assert said.startswith("serving.q.")


def test_an_adapter_that_cannot_be_read_is_served_with_a_rank_of_the_operator(fleet: Fleet) -> None:
    fleet.add("sql")
    fleet.served["flags"] = {"max-lora-rank": 32}

    assert "--lora-modules sql=/srv/adapters/sql" in fleet.lines()


def test_a_class_that_takes_no_adapters_is_refused() -> None:
    fleet = Fleet("OrionStarAI--Orion-14B")
    fleet.served["context"] = 2048
    fleet.add("sql", LORA)

    assert "does not load LoRA adapters for" in fleet.refusal()


def test_an_adapter_of_another_model_is_a_remark() -> None:
    named = {**LORA, "base_model_name_or_path": "Qwen/Qwen3-8B"}

    def said(model: str, config: dict[str, Any]) -> tuple[str, ...]:
        served = Served.model_validate(
            {
                "model": model,
                "revision": COMMIT,
                "adapters": {"sql": {"source": "/srv/sql"}},
            }
        )
        about = SimpleNamespace(adapters={"sql": parse_adapter(config)})
        return remarks({"q": served}, {"q": about})  # type: ignore[dict-item]

    (other,) = said("Qwen/Qwen3-32B", named)
    assert "adapter_config.json is Qwen/Qwen3-8B" in other
    assert said("Qwen/Qwen3-8B", named) == ()
    # Free text: where it lay on the machine that trained it.
    for base in ("/data/run7/qwen", "./out", "", None, 7):
        assert said("Qwen/Qwen3-32B", {**LORA, "base_model_name_or_path": base}) == ()

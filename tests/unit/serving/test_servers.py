"""Servers of a plan and of what runs, and the adapters that each loads."""

from __future__ import annotations

from gpufleet.planning.adapter_flags import LAYER, MODULES
from gpufleet.planning.flag_layers import LayeredFlag
from gpufleet.planning.stage import Running, Stage
from gpufleet.serving import servers
from gpufleet.serving.servers import Server

WORDS = ["chat=/srv/chat", "sql=/srv/sql"]


def stage(replica: int, *words: str) -> Stage:
    flags = (LayeredFlag(MODULES, list(words), LAYER),) if words else ()
    return Stage("m", replica, "a", (0,), ("GPU-0",), 8000 + replica, 1, flags=flags)


def runs(replica: int, *words: str) -> Running:
    arguments = ("vllm serve", "--lora-modules " + " ".join(words), "--port 8000")
    return Running("m", replica, "a", ("GPU-0",), 8000 + replica, arguments=arguments)


def test_adapters_are_those_of_the_plan_and_those_of_the_unit() -> None:
    (planned,) = servers.planned_servers([stage(0, *WORDS)])
    (running,) = servers.running_servers([runs(0, *WORDS)])

    assert planned.adapters == running.adapters == ("chat", "sql")
    assert servers.planned_servers([stage(0)])[0].adapters == ()
    own = LayeredFlag(MODULES, [*WORDS, '{"name": "a", "path": "/a"}'], "flags")
    assert Stage("m", 0, "a", (0,), ("GPU-0",), 8000, 1, flags=(own,)).adapters == ("chat", "sql")


def test_until_a_plan_is_carried_out_a_server_has_what_it_loads_before_and_after() -> None:
    planned = servers.planned_servers([stage(0, "new=/n", "sql=/s"), stage(1, "new=/n", "sql=/s")])
    running = servers.running_servers([runs(0, "old=/o", "sql=/s"), runs(2, "old=/o")])

    assert servers.planned_and_running(planned, running) == (
        Server("a", "m-0", 0, "m", 8000, ("sql",)),
        Server("a", "m-1", 0, "m", 8001, ("new", "sql")),
        Server("a", "m-2", 0, "m", 8002, ("old",)),
    )

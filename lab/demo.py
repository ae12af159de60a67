"""Run `make lab`: start nodes, deploy the fleet, and show plan, endpoints and completions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gpufleet.errors import FleetError
from lab import provisioning_sources
from lab.nodes import DEFAULT_NODES, Lab
from lab.state import LabState

ROOT = Path(__file__).parent.parent
INVENTORY = "inventories/lab.py"

# A first deploy builds vLLM's environment on both nodes at once (2 GB unpacked on each node), and
# loads a model twice. This took four minutes on two cores (measured). The limit is for a machine
# that is much slower.
DEPLOY_SECONDS = 1800


def run(lab_id: str) -> None:
    """Start the lab, deploy it, and show the result. Raises `FleetError` on a failure."""
    console = Console()
    began = time.monotonic()

    def say(line: str) -> None:
        console.print(f"[dim]{time.monotonic() - began:4.0f} s[/dim] {line}", highlight=False)

    lab = Lab.open(lab_id, say)
    lab.up(DEFAULT_NODES)
    provisioning_sources.provide(LabState.load(lab_id), say)
    say(f"pyinfra -y {INVENTORY} deploys/vllm.py")
    deploy(lab_id)
    say("deployed")
    show_plan(lab_id)
    show_answers(LabState.load(lab_id), console)
    say("done. `gpufleet lab status`, `gpufleet lab ssh gpu-01`; `make clean` removes the lab")


def deploy(lab_id: str) -> None:
    """Run the main deploy against the lab, with its output on this terminal."""
    command = [pyinfra(), "-y", INVENTORY, "deploys/vllm.py"]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment(lab_id), check=False, timeout=DEPLOY_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise FleetError(f"the deploy took over {DEPLOY_SECONDS} s: see its output above") from None
    if done.returncode:
        raise FleetError(f"the deploy failed (exit status {done.returncode}): see its output above")


def show_plan(lab_id: str) -> None:
    """Print the plan with the operator's own command."""
    gpufleet = Path(sys.executable).with_name("gpufleet")
    subprocess.run(
        [gpufleet, "plan", INVENTORY],
        cwd=ROOT,
        env=environment(lab_id),
        check=True,
        timeout=300,
    )


def show_answers(state: LabState, console: Console) -> None:
    """Print every endpoint and one completion from each, requested like a client."""
    table = Table("endpoint", "model", "prompt", "completion", title="Answers")
    for url in endpoints(state):
        model, text = complete(url, (state.dir / provisioning_sources.API_KEY).read_text().strip())
        table.add_row(f"{url}/v1", model, PROMPT, repr(text))
    console.print(table)


PROMPT = "Hello"


def endpoints(state: LabState) -> list[str]:
    """Return the planned endpoints with addresses for clients outside the nodes."""
    gpufleet = Path(sys.executable).with_name("gpufleet")
    plan = subprocess.run(
        [gpufleet, "plan", INVENTORY, "--json"],
        cwd=ROOT,
        env=environment(state.id),
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    stages = json.loads(plan.stdout)["stages"]
    return [f"http://{state.node(stage['node']).address}:{stage['port']}" for stage in stages]


def complete(url: str, key: str) -> tuple[str, str]:
    """Return the model's name and one completion from an OpenAI-compatible endpoint."""
    model = _ask(f"{url}/v1/models", key)["data"][0]["id"]
    body = {"model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    return model, _ask(f"{url}/v1/completions", key, body)["choices"][0]["text"]


def _ask(url: str, key: str, body: dict[str, Any] | None = None) -> Any:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(url, data, headers), timeout=60) as answer:
        return json.load(answer)


def pyinfra() -> str:
    """Return the pyinfra command of this environment."""
    return str(Path(sys.executable).with_name("pyinfra"))


def environment(lab_id: str) -> dict[str, str]:
    """Return this process' environment with the lab's id."""
    return {**os.environ, "GPUFLEET_LAB": lab_id}

"""One level of load by gpufleet's client and by guidellm, and what each says of it."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpufleet.load_test.arrivals import Poisson
from gpufleet.load_test.client_process import LoadSpec, run_level
from gpufleet.load_test.intervals import percentile
from gpufleet.load_test.outcomes import Outcome
from gpufleet.load_test.workloads import TokenRange, Workload, fixed_length

GIVE_UP_SECONDS = 30.0
SEED = 1
MODEL = "stand-in"
TOKENIZER = """
import sys
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
made = Tokenizer(models.BPE(vocab={each: at for at, each in enumerate(letters)}, merges=[]))
made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
made.decoder = decoders.ByteLevel()
PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(sys.argv[1])
"""
"""A token for each byte: guidellm needs a tokenizer, and downloads one otherwise."""


@dataclass(frozen=True)
class Said:
    """A client's results for one level. Latencies in seconds, sorted."""

    requests: int
    ttft: list[float]
    """From when the client counts: gpufleet's from the intended arrival, guidellm's from the
    moment at which it sent."""
    e2e: list[float]
    lag: list[float]
    """From the intended arrival until it was sent."""
    errors: int
    cpu_seconds: float
    """Processor time of the process and its children; gpufleet's without its start."""

    def percentile(self, values: list[float], percent: float) -> float:
        """Return a percentile; not a number without values."""
        return percentile(values, percent) if values else float("nan")


def by_gpufleet(url: str, rate: float, seconds: float, prompt: int, tokens: int) -> Said:
    """Run a level with one client process."""
    work = Workload("beside", fixed_length(prompt), fixed_length(tokens), "beside guidellm")
    requests = work.requests(MODEL, TokenRange(100, 1000), "beside")
    spec = LoadSpec(url, work.path, Poisson(rate), requests, SEED, seconds, GIVE_UP_SECONDS)
    found: list[Outcome] = []
    run = run_level(spec, 1, found.append, lambda _now, _due: False)
    return Said(
        len(found),
        sorted(each.ttft for each in found if each.ttft is not None),
        sorted(each.e2e for each in found if each.e2e is not None),
        sorted(each.sent - each.due for each in found),
        sum(bool(each.error) for each in found),
        run.cpu_seconds * run.sent,
    )


class Guidellm:
    """The program of an environment of its own."""

    def __init__(self, program: Path, folder: Path) -> None:
        """Make its tokenizer in a folder, where it writes its reports, too."""
        self._program, self._folder = program, folder
        self._environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "GUIDELLM__LOGGING__CONSOLE_LOG_LEVEL": "ERROR",
        }
        subprocess.run(
            [str(program.with_name("python")), "-c", TOKENIZER, str(folder / "tokenizer")],
            env=self._environment,
            check=True,
            timeout=300,
        )

    @property
    def version(self) -> str:
        """Return what it calls itself."""
        asked = [str(self._program), "--version"]
        done = subprocess.run(asked, env=self._environment, check=True, capture_output=True)
        return done.stdout.decode().strip()

    def level(self, url: str, rate: float, seconds: float, prompt: int, tokens: int) -> Said:
        """Run a level with the number of processes that it chooses."""
        report = self._folder / "report.json"
        command = [
            str(self._program), "run", "--disable-console",
            "--backend", f"kind=openai_http,target={url},model={MODEL},"
            "request_format=/v1/completions",
            "--profile", f"kind=poisson,rate={rate:g}",
            "--constraint", f"kind=max_duration,seconds={seconds:g}",
            "--tokenizer", f"kind=huggingface_auto,model={self._folder / 'tokenizer'}",
            "--data", f"kind=synthetic_text,prompt_tokens={prompt},output_tokens={tokens}",
            "--output", f"kind=json,path={report}",
        ]  # fmt: skip
        report.unlink(missing_ok=True)
        log = self._folder / "guidellm.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, env=self._environment, cwd=self._folder, stdout=out, stderr=out
            )
            # With its children, which it waits for.
            _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode or not report.exists():
            raise SystemExit(f"guidellm failed: {log.read_text(errors='replace')[-2000:]}")
        return guidellm_said(json.loads(report.read_text()), used.ru_utime + used.ru_stime)


def guidellm_said(report: dict[str, Any], cpu_seconds: float) -> Said:
    """Read the only level of a report."""
    requests = report["benchmarks"][0]["requests"]
    timings = [each["info"]["timings"] for each in requests["successful"]]
    return Said(
        len(timings),
        sorted(each["first_token_iteration"] - each["request_start"] for each in timings),
        sorted(each["last_token_iteration"] - each["request_start"] for each in timings),
        sorted(each["request_start"] - each["targeted_start"] for each in timings),
        len(requests["errored"]),
        cpu_seconds,
    )

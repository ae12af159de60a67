"""A fleet on which every line is OK: two recorded nodes, a gateway that also watches."""

from __future__ import annotations

import base64
import datetime as dt
import json
from functools import cache
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from gpufleet.fleet.declared_hardware import with_identity
from gpufleet.planning.stage import Running, Stage
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.upgrade.plan.replica_load import ReplicaLoad
from tests.support.sound_node import sound_node

NOW = dt.datetime(2026, 11, 28, 12, 0, tzinfo=dt.UTC)
INVENTORY = "inventories/prod.py"
GPU_NODES, FRONT = ("gpu-01", "gpu-02"), "front"
RELEASE = "0.32.0-e28e5608c2"
RELEASES = f"/opt/vllm/releases/{RELEASE}"
REVISION = "0123456789abcdef0123456789abcdef01234567"
MODEL_DIRECTORY = f"/var/lib/vllm/models/Qwen--Qwen3-32B/{REVISION}"
KEY = "a-client's-key"
KEY_SHA256 = "aa8b45201bb510f439da942167f27a3ae05674af9b17f49ae9180cad0af2d01e"
GIB = 1 << 30


def gpu_settings(**changed: Any) -> NodeSettings:
    """Return the settings of a node that serves."""
    plain: dict[str, Any] = {
        "gpu_lock": {"driver": "580.95.06"},
        "firewall": {},
        "vllm": {"version": "0.32.0", "lock": "locks/none.txt", "api_key_file": "secrets/key"},
        "serving": {
            "qwen": {
                "model": "Qwen/Qwen3-32B",
                "revision": REVISION,
                "replicas": 2,
                "objectives": {"ttft_p99_seconds": 0.5},
            }
        },
    }
    return NodeSettings.model_validate({**plain, **changed})


def front_settings(**changed: Any) -> NodeSettings:
    """Return the settings of the gateway, which also watches."""
    plain: dict[str, Any] = {
        "gpu_node": False,
        "firewall": {},
        "gateway": {
            "tls": {"certificate_file": "secrets/gateway.pem", "key_file": "secrets/gateway.key"},
            "clients": [{"name": "app", "key_sha256": KEY_SHA256, "requests_per_minute": 600}],
            "per_server": 64,
        },
        "monitoring": {"alertmanager": {"page": {"pagerduty_key_file": "secrets/pagerduty"}}},
    }
    return NodeSettings.model_validate({**plain, **changed})


def fleet_settings() -> dict[str, NodeSettings]:
    """Return the settings of all nodes."""
    return {**dict.fromkeys(GPU_NODES, gpu_settings()), FRONT: front_settings()}


def probe(name: str) -> dict[str, Any]:
    """Return the probe of a node; its disks have 500 GiB for each purpose."""
    document = with_identity(sound_node(), name)
    disk = {"mount": "/", "size_mib": 1 << 20, "free_mib": 500 << 10}
    document["system"]["disks"] = dict.fromkeys(
        ("/", "/opt/vllm/releases", "/var/lib/vllm/models"), disk
    )
    return document


def stages(*nodes: str) -> tuple[Stage, ...]:
    """Return a plan with a replica on each node."""
    return tuple(
        Stage("qwen", number, node, (0,), (f"GPU-{number}",), 8000, 1)
        for number, node in enumerate(nodes)
    )


def running(*nodes: str) -> tuple[Running, ...]:
    """Return what runs: a replica on each node."""
    return tuple(
        Running("qwen", number, node, (f"GPU-{number}",), 8000, release=RELEASE)
        for number, node in enumerate(nodes)
    )


def load(replica: str, node: str, busy: float = 8.0, **changed: Any) -> ReplicaLoad:
    """Return how busy a replica is, of 64 requests at once."""
    plain: dict[str, Any] = {
        "replica": replica,
        "model": replica.rpartition("-")[0],
        "node": node,
        "running": busy,
        "waiting": 0.0,
        "most_running": 64,
        "kv_usage": 0.1,
    }
    return ReplicaLoad(**{**plain, **changed})


@cache
def certificate(days: int = 200) -> str:
    """Return a certificate that ends so many days from now, as node_look.py has it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "gateway")])
    built = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(NOW - dt.timedelta(days=900))
        .not_valid_after(NOW + dt.timedelta(days=days, hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("llm.example")]), critical=False)
        .sign(key, SHA256())
    )
    return base64.b64encode(built.public_bytes(Encoding.DER)).decode()


def counts(delivered: int, failed: int = 0) -> str:
    """Return Alertmanager's /metrics about PagerDuty."""
    name = "alertmanager_notifications"
    return (
        f'# TYPE {name}_total counter\n{name}_total{{integration="pagerduty"}} '
        f"{delivered + failed}\n# TYPE {name}_failed_total counter\n"
        f'{name}_failed_total{{integration="pagerduty",reason="other"}} {failed}\n'
    )


def model(**changed: Any) -> dict[str, Any]:
    """Return what a node says of a whole model."""
    plain = {"complete": True, "missing": [], "extra": [], "changed": [], "wrong": []}
    return {**plain, "hashed": 4, "bytes": 61 * GIB, **changed}


def look(node: str, **changed: Any) -> dict[str, Any]:
    """Return node_look.py's answer of a sound node; a keyword replaces a part of it."""
    at = NOW.timestamp()
    plain: dict[str, Any] = {
        "schema": 1,
        "began": at,
        "clock": at + 1,
        "names": {"hub.example": ["203.0.113.7"], **dict.fromkeys((*GPU_NODES, FRONT), ABSENT)},
        "pages": {"node_exporter.port": {"status": 200}},
        "tls": {},
        "models": {},
        "folders": {},
        "firewall": True,
    }
    if node in GPU_NODES:
        plain["models"] = {MODEL_DIRECTORY: model()}
        plain["folders"] = {RELEASES: 9 * GIB}
        plain["pages"] |= {
            "source packages": {"status": 200},
            "source model qwen": {"status": 401},
        }
    else:
        plain["pages"] |= {
            "gateway.port": {"status": 401},
            "gateway.metrics_port": {"status": 200},
            "monitoring.prometheus.port": {"status": 200},
            "monitoring.alertmanager.port": {"status": 200},
            "alertmanager.metrics": {"status": 200, "body": counts(3)},
            "prometheus.alertmanagers": {
                "status": 200,
                "body": json.dumps(
                    {"data": {"activeAlertmanagers": [{"url": "http://127.0.0.1:9093/api"}]}}
                ),
            },
        }
        shown = {"verified": True, "why": "", "certificate": certificate()}
        plain["tls"] = {f"{FRONT} gateway.port": shown}
    for part, value in changed.items():
        merged = isinstance(plain[part], dict) and isinstance(value, dict)
        plain[part] = {**plain[part], **value} if merged else value
    return plain


ABSENT = {"missing": "absent"}


def looks(**of_nodes: Any) -> dict[str, Any]:
    """Return all nodes' answers; `gpu_01=...` replaces that of gpu-01."""
    sound = {node: look(node) for node in (*GPU_NODES, FRONT)}
    return sound | {name.replace("_", "-"): each for name, each in of_nodes.items()}

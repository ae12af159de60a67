"""Rules for options of the HTTP server that contradict each other, or prevent its start.  Pure."""

from __future__ import annotations

import ipaddress
import re
from typing import Any

from gpufleet.flags.conflict_rule import Conflict

_PORTS = "--data-parallel-multi-port-external-lb"
_HEADLESS = "--headless"
_GRPC_PORT = "--grpc-port"
_NO_NAME = re.compile(r"[\s/:\[\]]")
"""
Characters that a host name cannot have. A word with such a character is a URL, a path, or an
address with a port.
"""


def _is_no_address(host: Any) -> bool:
    """Return whether this value cannot be an address to which a server socket is bound."""
    if not isinstance(host, str) or not _NO_NAME.search(host):
        return False
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return True
    return False


def _is_no_path(text: str) -> bool:
    return "." not in text


SERVER: tuple[Conflict, ...] = (
    Conflict(
        ("--enable-auto-tool-choice",),
        "0.6.0",
        lambda s: s.on("--enable-auto-tool-choice") and not s.value("--tool-call-parser"),
        "`--enable-auto-tool-choice` needs `--tool-call-parser`",
        "entrypoints cli_args.py validate_parsed_serve_args",
    ),
    Conflict(
        ("--enable-log-outputs",),
        "0.11.0",
        lambda s: s.on("--enable-log-outputs") and not s.on("--enable-log-requests"),
        "`--enable-log-outputs` needs `--enable-log-requests`",
        "entrypoints cli_args.py validate_parsed_serve_args",
    ),
    Conflict(
        ("--sse-keep-alive-interval",),
        "0.29.0",
        lambda s: s.number("--sse-keep-alive-interval", 0) < 0,
        "`--sse-keep-alive-interval` is a number of seconds, and must be 0 (off) or more",
        "entrypoints cli_args.py validate_parsed_serve_args",
    ),
    Conflict(
        ("--enable-per-request-metrics", "--disable-log-stats"),
        "0.25.0",
        lambda s: s.on("--enable-per-request-metrics") and s.on("--disable-log-stats"),
        "`--enable-per-request-metrics` conflicts with `--disable-log-stats`",
        "entrypoints cli_args.py validate_parsed_serve_args",
        leave_out="--disable-log-stats",
    ),
    Conflict(
        (_GRPC_PORT,),
        "0.32.0",
        lambda s: (
            s.value(_GRPC_PORT) is not None
            and s.environment.get("VLLM_USE_RUST_FRONTEND", "0").strip() in {"", "0"}
        ),
        "`--grpc-port` needs VLLM_USE_RUST_FRONTEND=1",
        "entrypoints/launchers/cli_args.py validate_grpc_port_arg",
    ),
    Conflict(
        (_GRPC_PORT, "--grpc", _HEADLESS, _PORTS),
        "0.32.0",
        lambda s: (
            s.value(_GRPC_PORT) is not None and (s.on("--grpc") or s.on(_HEADLESS) or s.on(_PORTS))
        ),
        "`--grpc-port` is for a single Rust frontend, so it cannot be set together with "
        "`--grpc`, `--headless` or `--data-parallel-multi-port-external-lb`",
        "entrypoints/launchers/cli_args.py validate_grpc_port_arg",
    ),
    Conflict(
        (_GRPC_PORT, "--port"),
        "0.32.0",
        lambda s: (
            s.value(_GRPC_PORT) not in {None, 0}
            and s.value(_GRPC_PORT) == s.value("--port")
            and not s.value("--uds")
        ),
        "`--grpc-port` must differ from `--port`",
        "entrypoints/launchers/cli_args.py validate_grpc_port_arg",
    ),
    Conflict(
        ("--middleware",),
        "0.12.0",
        lambda s: any(map(_is_no_path, s.texts("--middleware"))),
        "`--middleware` must be a class or a function, written as module.name",
        "entrypoints/openai/api_server.py build_app",
        wrong=_is_no_path,
    ),
    Conflict(
        ("--port",),
        "0.12.0",
        lambda s: (
            not 0 <= s.number("--port", 0) < 1 << 16
            and not s.on(_HEADLESS)
            and not s.value("--uds")
        ),
        "`--port` must be from 0 to 65535",
        "entrypoints/openai/api_server.py create_server_socket",
    ),
    Conflict(
        ("--host",),
        "0.8.5",
        lambda s: (
            _is_no_address(s.value("--host")) and not s.on(_HEADLESS) and not s.value("--uds")
        ),
        "`--host` must be an address or a name of this machine, for example 0.0.0.0 or ::, "
        "without http://, brackets, a port or a path. Write the port as `--port`",
        "entrypoints/openai/api_server.py create_server_socket",
    ),
)

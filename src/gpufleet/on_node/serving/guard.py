"""RUNS IN THE SERVER: require the API key on every path but two.

vLLM's own key guards paths that begin with /v1 and a few others; /invocations computes the same,
and /tokenize, /scale_elastic_ep and more answer without a key. vLLM loads this by `--middleware
gpufleet_guard.Guard`. It is the last middleware on the command line, and so runs before all others
and every route.

Only `OPEN` answers without a key, to GET and HEAD: whether the server lives, which balancers ask,
and its metrics, which Prometheus reads (`firewall.monitoring` says who reaches them). A path is
open only as it was sent: one that is percent-encoded needs the key. So do websockets. A type of
connection that is not known here is refused.

Pure ASGI, standard library, Python 3.8: it runs in the Python of any release of vLLM. The key is
the one that the launcher gives vLLM (`VLLM_API_KEY`, of the unit's credential); without it the
server answers no request.
"""

from __future__ import annotations

import hmac
import os
from hashlib import sha256
from typing import Any, Awaitable, Callable, Iterable, MutableMapping, Tuple

OPEN = frozenset({"/health", "/metrics"})
"""Paths that answer without a key, below `--root-path` as well as without it."""
KEY = b"VLLM_API_KEY"

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

UNAUTHORIZED = 401
BODY = b'{"error":"Unauthorized"}'  # vLLM's own words
HEADERS = [
    (b"content-type", b"application/json"),
    (b"content-length", b"%d" % len(BODY)),
    (b"www-authenticate", b"Bearer"),
]
POLICY_VIOLATION = 1008  # RFC 6455, section 7.4.1


class Guard:
    """ASGI middleware that requires the API key."""

    def __init__(self, app: App, key: "bytes | None" = None) -> None:
        """Wrap an application; `key` replaces the key of the environment."""
        key = os.environb.get(KEY, b"") if key is None else key
        if not key:
            raise RuntimeError("gpufleet's guard has no key: %s is not set" % KEY.decode())
        self.app = app
        # Hashes are compared, in constant time: neither the key's letters nor its length show.
        self.wanted = sha256(key).digest()

    def __call__(self, scope: Message, receive: Receive, send: Send) -> Awaitable[None]:
        """Pass an authorised connection on, and refuse any other."""
        kind = scope["type"]
        if kind == "http":
            if is_open(scope) or self.has_key(scope["headers"]):
                return self.app(scope, receive, send)
            return refuse(send, "http.response")
        if kind == "websocket":
            if self.has_key(scope["headers"]):
                return self.app(scope, receive, send)
            if "websocket.http.response" in (scope.get("extensions") or ()):
                return refuse(send, "websocket.http.response")
            return send({"type": "websocket.close", "code": POLICY_VIOLATION})
        if kind == "lifespan":  # the server's own start and stop
            return self.app(scope, receive, send)
        raise RuntimeError("gpufleet's guard does not know connections of type %r" % kind)

    def has_key(self, headers: Iterable[Tuple[bytes, bytes]]) -> bool:
        """Return whether a request has the key as vLLM expects it: `Authorization: Bearer KEY`."""
        for name, value in headers:
            if name == b"authorization":  # the first one counts, as it does for vLLM
                scheme, _, key = value.partition(b" ")
                shown = sha256(key).digest()
                return hmac.compare_digest(shown, self.wanted) and scheme.lower() == b"bearer"
        return False


def is_open(scope: Message) -> bool:
    """Return whether a request needs no key, by its routing path."""
    if scope.get("method") not in ("GET", "HEAD"):
        return False
    path: str = scope["path"]
    raw = scope.get("raw_path")
    if raw is not None and raw != path.encode("utf-8", "surrogatepass"):
        return False
    root = scope.get("root_path") or ""
    if root and path.startswith(root + "/"):
        path = path[len(root) :]
    return path in OPEN


async def refuse(send: Send, kind: str) -> None:
    """Answer 401."""
    await send({"type": kind + ".start", "status": UNAUTHORIZED, "headers": HEADERS})
    await send({"type": kind + ".body", "body": BODY})

"""Start LiteLLM's proxy with only the API accessible, to clients with known keys.

RUNS ON THE NODE, under the release's own Python: `litellm-serve DIRECTORY` serves what
`config.yaml` and `front.json` there say, `litellm-serve --check DIRECTORY` has LiteLLM read them.

LiteLLM without a database has one key for all clients, and obeys a request's body: `api_base` sends
the upstream's key to any address. So only this filter has access to LiteLLM. It passes on requests
for declared names from authorised clients, with body keys that model servers know. It logs client,
request and result, without keys or prompts.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[dict[str, Any], Receive, Send], Awaitable[None]]

CHAT = "/v1/chat/completions"
RERANK = ("/rerank", "/v1/rerank", "/v2/rerank")
PATHS = (CHAT, "/v1/completions", "/v1/embeddings", *RERANK)
HIDDEN = (b"x-litellm-", b"llm_provider-", b"server")
"""Prefixes of response headers that clients do not get, because they have internal addresses."""
# Where Debian's and Red Hat's kin keep whom they believe.
SYSTEMS = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt")
# LiteLLM fetches prices, texts and presets, and offers pages, unless it is told not to.
QUIET = {
    "DISABLE_ADMIN_UI": "True",
    "HF_HUB_OFFLINE": "1",
    "LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS": "True",
    "LITELLM_LOCAL_AUTOROUTER_PRESETS": "True",
    "LITELLM_LOCAL_BLOG_POSTS": "True",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOCAL_POLICY_TEMPLATES": "True",
    # Its tracebacks show what a model's server said, and that may be a prompt.
    "LITELLM_LOG": "CRITICAL",
    # It reads no .env file.
    "LITELLM_MODE": "PRODUCTION",
    "NO_DOCS": "True",
    "NO_REDOC": "True",
}


class Front:
    """A filter in front of LiteLLM that checks the client's key, the path and the body's keys."""

    def __init__(
        self, app: App, told: Mapping[str, Any], own_key: str, upstream_key: str = ""
    ) -> None:
        self.app = app
        self.clients = {each["key_sha256"]: each for each in told["clients"]}
        self.anybody = {"name": "anybody", "models": []} if told["anybody"] else None
        self.models: list[str] = told["models"]
        self.body_keys = frozenset(told["body_keys"])
        self.chat_keys = frozenset(told["chat_keys"])
        self.rerank_keys = frozenset(told["rerank_keys"])
        self.chat_models: list[str] = told["chat_models"]
        self.ignored_keys = frozenset(told["ignored_keys"])
        self.headers = tuple(name.encode() for name in told["headers"])
        self.most_bytes: int = told["most_bytes"]
        self.own_key = own_key.encode()
        self.upstream_key = upstream_key.encode()

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Serve one request, or handle another ASGI event."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await self._request(scope, receive, send)

    async def _request(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        begun, at = time.monotonic(), (scope["method"], scope["path"])
        noted: dict[str, Any] = {"client": "-", "model": "-", "status": 0}

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                noted["status"] = message["status"]
                message = {**message, "headers": _shown(message.get("headers", ()))}
            elif self.upstream_key:
                # At some paths LiteLLM passes a server's error on as it is: it may repeat the key.
                hidden = b"*" * len(self.upstream_key)
                body = message.get("body", b"").replace(self.upstream_key, hidden)
                message = {**message, "body": body}
            await send(message)

        try:
            if at == ("GET", "/healthy"):
                await _say(send, 200, {"status": "ok"})
                return
            try:
                asked = await self._asked(scope, receive, noted)
            except _Refused as refused:
                await _say(answer, refused.status, refused.document)
                return
            if isinstance(asked, bytes):
                await self.app(*self._passed_on(scope, asked, receive), answer)
            else:
                await _say(answer, 200, asked)
        finally:
            if at != ("GET", "/healthy"):
                seconds = time.monotonic() - begun
                words = (noted["client"], noted["model"], noted["status"], f"{seconds:.3f}s", *at)
                print(*words, flush=True)

    async def _asked(
        self, scope: dict[str, Any], receive: Receive, noted: dict[str, Any]
    ) -> bytes | dict[str, Any]:
        """Return the body for LiteLLM, or an answer that does not need LiteLLM."""
        at = scope["method"], scope["path"]
        if at != ("GET", "/v1/models") and not (at[0] == "POST" and at[1] in PATHS):
            raise _Refused(404, "This path does not exist here: use the gateway.", code="not_found")
        headers = dict(scope["headers"])
        client = self.clients.get(_key_hash(headers), self.anybody)
        if client is None:
            raise _Refused(
                401,
                "The API key is missing or not known: send it as `Authorization: Bearer KEY`.",
                code="invalid_api_key",
            )
        noted["client"] = client["name"]
        allowed = [name for name in self.models if not client["models"] or name in client["models"]]
        if at[0] == "GET":
            data = [
                {"id": name, "object": "model", "created": 0, "owned_by": "vllm"}
                for name in allowed
            ]
            return {"object": "list", "data": data}
        body = await self._body(headers, receive)
        model = body.get("model")
        if not isinstance(model, str) or model not in self.models:
            raise _Refused(404, "There is no such model: GET /v1/models.", code="model_not_found")
        if model not in allowed:
            raise _Refused(
                403, "This key may not use this model.", "permission_error", "model_not_allowed"
            )
        noted["model"] = model
        known = self.body_keys if at[1] == CHAT else self.body_keys - self.chat_keys
        if at[1] in RERANK:
            known = self.rerank_keys
        if strange := sorted(set(body) - known - self.ignored_keys):
            raise _Refused(
                400,
                f"{', '.join(strange)[:200]}: this proxy does not pass on these keys at {at[1]}.",
                code="unknown_parameter",
            )
        if at[1] != CHAT and model in self.chat_models:
            raise _Refused(
                400,
                f"This name has defaults for chats: send the request to {CHAT}.",
                code="chat_only",
            )
        return json.dumps(
            {key: value for key, value in body.items() if key not in self.ignored_keys}
        ).encode()

    async def _body(self, headers: Mapping[bytes, bytes], receive: Receive) -> dict[str, Any]:
        too_large = _Refused(
            413,
            f"The request exceeds this proxy's limit of {self.most_bytes >> 20} MiB.",
            code="request_too_large",
        )
        with contextlib.suppress(ValueError):
            if int(headers.get(b"content-length", b"0")) > self.most_bytes:
                raise too_large
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                raise _Refused(400, "The client has gone.")
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self.most_bytes:
                raise too_large
            if not message.get("more_body"):
                break
        try:
            found = json.loads(b"".join(parts))
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise _Refused(400, "The body is not a JSON object.")
        return found

    def _passed_on(
        self, scope: dict[str, Any], body: bytes, receive: Receive
    ) -> tuple[dict[str, Any], Receive]:
        """Return the scope and messages of a request for LiteLLM, without the client's key."""
        headers = [each for each in scope["headers"] if each[0] in self.headers]
        headers += [
            (b"authorization", b"Bearer " + self.own_key),
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        first = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def messages() -> Message:
            return next(first, None) or await receive()

        return {**scope, "headers": headers, "query_string": b""}, messages


class _Refused(Exception):  # noqa: N818  # an answer, not a program error
    def __init__(
        self, status: int, message: str, kind: str = "invalid_request_error", code: str = ""
    ) -> None:
        super().__init__(message)
        self.status = status
        said = {"message": message, "type": kind, "param": None, "code": code or None}
        self.document = {"error": said}


def _key_hash(headers: Mapping[bytes, bytes]) -> str:
    said = headers.get(b"authorization", b"")
    key = said[7:].strip() if said[:7].lower() == b"bearer " else headers.get(b"x-api-key", b"")
    return hashlib.sha256(key).hexdigest()


def _shown(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return [each for each in headers if not each[0].lower().startswith(HIDDEN)]


async def _say(send: Send, status: int, document: Mapping[str, Any]) -> None:
    body = json.dumps(document).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def authorities(directory: str) -> str | None:
    """Return the file of trusted certificate authorities, because LiteLLM has its own list."""
    known = (f"{directory}/upstream-ca.pem", *SYSTEMS)
    return next((each for each in known if Path(each).exists()), None)


def credential(name: str) -> Path | None:
    """Return the file of one of the unit's credentials, or None if it does not exist."""
    path = Path(os.environ.get("CREDENTIALS_DIRECTORY", "/nonexistent")) / name
    return path if path.exists() else None


def notify_systemd(state: str) -> None:
    """Notify systemd (sd_notify(3)) if systemd started this process."""
    if address := os.environ.get("NOTIFY_SOCKET"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:
            to.connect(address.replace("@", "\0", 1))
            to.sendall(state.encode())


def main(directory: str, *, only_check: bool) -> None:
    """Check the configuration, or serve until stopped."""
    told = json.loads((Path(directory) / "front.json").read_text())
    os.environ.update(QUIET)
    # LiteLLM does not start without a key of its own: a new secret one each time.
    own_key = os.environ["LITELLM_MASTER_KEY"] = f"sk-{secrets.token_hex(32)}"
    os.environ["CONFIG_FILE_PATH"] = f"{directory}/config.yaml"
    if (believed := authorities(directory)) is not None:
        os.environ["SSL_CERT_FILE"] = believed
    key = credential("upstream-key")
    upstream_key = key.read_text().strip() if key is not None else ""
    os.environ[told["key_variable"]] = upstream_key or "none"

    import uvicorn
    from litellm.proxy.proxy_server import ProxyConfig, app

    if only_check:
        read = ProxyConfig().load_config(router=None, config_file_path=f"{directory}/config.yaml")
        _, found, _ = asyncio.run(read)
        if (names := {each["model_name"] for each in found}) != {*told["models"]}:
            sys.exit(
                (
                    "LiteLLM reads other names than the ones in its configuration: "
                    f"{', '.join(sorted(names))}"
                )
            )
        return

    class Server(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            if self.started:
                notify_systemd("READY=1")

    tls = {}
    if (key := credential("tls-key")) is not None:
        tls = {"ssl_certfile": f"{directory}/tls.pem", "ssl_keyfile": str(key)}
    server = Server(
        uvicorn.Config(
            Front(app, told, own_key, upstream_key),
            host=told["listen"],
            port=told["port"],
            access_log=False,
            lifespan="on",
            log_level="warning",
            server_header=False,
            timeout_graceful_shutdown=told["drain_seconds"],
            timeout_keep_alive=told["keep_alive_seconds"],
            **tls,
        )
    )
    server.run()
    if not server.started:
        sys.exit(3)


if __name__ == "__main__":
    main(sys.argv[-1], only_check=sys.argv[1] == "--check")

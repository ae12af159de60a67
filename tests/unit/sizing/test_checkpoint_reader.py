"""A model's files from a directory and from a Hub: what is read, and how little of it."""

import json
import struct
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from time import sleep

import pytest

from gpufleet.errors import FleetError
from gpufleet.sizing import checkpoint_reader
from gpufleet.sizing.checkpoint_reader import Hub
from lab import fake_hub

TOKEN = "hf_of-the-test"
CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 8}
HEADER = {
    "__metadata__": {"format": "pt"},
    "model.norm.weight": {"dtype": "BF16", "shape": [8], "data_offsets": [0, 16]},
}
STORED = {"model.norm.weight": ("BF16", (8,))}
LARGE = 50_000_000


def weights(path, header=None, size=16):
    text = json.dumps(header or HEADER).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + size)


def checkpoint(folder, **config):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    weights(folder / "model.safetensors")
    return folder


def sharded(folder, shards=3):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    names = [f"model-{at:05}-of-{shards:05}.safetensors" for at in range(shards)]
    for at, name in enumerate(names):
        entry = {"dtype": "F8_E4M3", "shape": [4, 2], "data_offsets": [0, 8]}
        weights(folder / name, {f"layers.{at}.weight": entry}, LARGE)
    index = {
        "metadata": {"total_size": 8 * shards},
        "weight_map": {f"layers.{at}.weight": name for at, name in enumerate(names)},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


# -- from a directory ------------------------------------------------------------------------------


def test_a_directory_gives_its_config_and_what_its_headers_say(tmp_path):
    found = checkpoint_reader.read(str(checkpoint(tmp_path / "m")))

    assert found.config == CONFIG
    assert found.stored == STORED


def test_a_config_in_a_checkpoint_stands_for_the_whole_of_it(tmp_path):
    folder = checkpoint(tmp_path / "m")

    assert checkpoint_reader.read(str(folder / "config.json")).stored == STORED


def test_a_config_under_another_name_is_read_alone(tmp_path):
    (tmp_path / "llama.json").write_text(json.dumps(CONFIG))

    found = checkpoint_reader.read(str(tmp_path / "llama.json"))

    assert (found.config, found.stored, found.stored_bytes) == (CONFIG, None, None)


def test_shards_are_read_by_their_index(tmp_path):
    found = checkpoint_reader.read(str(sharded(tmp_path / "m")))

    assert found.stored_bytes == 24
    assert found.stored == {f"layers.{at}.weight": ("F8_E4M3", (4, 2)) for at in range(3)}


def test_a_half_downloaded_checkpoint_counts_by_its_index(tmp_path):
    folder = sharded(tmp_path / "m")
    (folder / "model-00001-of-00003.safetensors").unlink()

    found = checkpoint_reader.read(str(folder))

    assert (found.stored, found.stored_bytes) == (None, 24)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("config.json", b"{", "config.json: this is not JSON"),
        ("config.json", b"[]", "this is a list, but must be an object"),
        ("config.json", b"[" * 100_000, "has more nested levels"),
        (checkpoint_reader.INDEX, b'{"weight_map": [1]}', "`weight_map` does not have a file name"),
        (
            checkpoint_reader.INDEX,
            b'{"weight_map": {"a": 1}}',
            "`weight_map` does not have a file name",
        ),
        (
            checkpoint_reader.INDEX,
            b'{"weight_map": {"a": "../x"}}',
            "`weight_map` does not have a file name",
        ),
        (
            checkpoint_reader.INDEX,
            b'{"weight_map": {"a": "/etc/x"}}',
            "`weight_map` does not have a file name",
        ),
        ("model.safetensors", b"version https://git-lfs", "is not a safetensors file"),
        ("model.safetensors", b"", "is not a safetensors file"),
        ("model.safetensors", struct.pack("<Q", 4) + b'"ab"', "this is a str"),
        ("model.safetensors", struct.pack("<Q", 9) + b'{"a": {}}', "is not valid safetensors"),
    ],
)
def test_a_file_that_is_not_what_its_name_says_is_named(tmp_path, name, content, says):
    folder = checkpoint(tmp_path / "m")
    (folder / name).write_bytes(content)

    with pytest.raises(FleetError, match=says):
        checkpoint_reader.read(str(folder))


@pytest.mark.parametrize("name", ["./nothing", "/nothing/here", "a/b/c", "owner/na me"])
def test_what_is_neither_here_nor_a_name_is_refused(name):
    with pytest.raises(FleetError, match="this directory or file does not exist"):
        checkpoint_reader.read(name)


@pytest.mark.parametrize("name", ["~nobody-of-this-name/m", "m" * 5000])
def test_what_no_file_can_be_called_is_refused_in_a_sentence(name):
    with pytest.raises(FleetError, match="cannot be read"):
        checkpoint_reader.read(name)


def test_an_index_without_a_number_of_bytes_is_none(tmp_path):
    """JSON as Python reads it knows Infinity."""
    folder = checkpoint(tmp_path / "m")
    (folder / checkpoint_reader.INDEX).write_text('{"metadata": {"total_size": Infinity}}')

    assert checkpoint_reader.read(str(folder)).stored_bytes is None


def test_a_directory_without_a_config_says_so(tmp_path):
    with pytest.raises(FleetError, match=r"has no config\.json"):
        checkpoint_reader.read(str(tmp_path))


# -- from the Hub ----------------------------------------------------------------------------------


class _Served(ThreadingHTTPServer):
    """A Hub on this machine: the lab's stand-in behind a real server that counts what it sends."""

    daemon_threads = True
    models: Path
    sent: int = 0
    ranges: bool = True
    delay: float = 0.0
    gated: bool = False
    drips: bool = False
    """A byte of weights at a time, twice a second."""
    token: str = TOKEN


class _Handler(BaseHTTPRequestHandler):
    server: _Served

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, *, body):
        sleep(self.server.delay)
        authorization = self.headers.get("Authorization", "")
        target = self.path.split("?")[0]
        found = fake_hub.answer(self.server.models, target, authorization, TOKEN)
        status, headers, content = int(found.status), dict(found.headers), found.body
        if self.server.gated and "/resolve/" in target:
            status, content = 403, b"{}"
            headers |= {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"}
            found = None
        if found is not None and found.path is not None:
            content = found.path.read_bytes()
            whole = len(content)
            if self.server.ranges and (asked := self.headers.get("Range")):
                first, last = (int(end) for end in asked.removeprefix("bytes=").split("-"))
                content = content[first : last + 1]
                status = 206
                headers["Content-Range"] = f"bytes {first}-{first + len(content) - 1}/{whole}"
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            drips = self.server.drips and target.endswith(".safetensors")
            size = 1 if drips else 1 << 16
            try:
                for start in range(0, len(content), size):
                    self.wfile.write(content[start : start + size])
                    self.server.sent += len(content[start : start + size])
                    if drips:
                        sleep(0.5)
            except OSError:  # the client has read enough
                self.close_connection = True

    def log_message(self, *_):
        pass


@contextmanager
def served(models, **settings):
    server = _Served(("127.0.0.1", 0), _Handler)
    server.models = models
    for name, value in settings.items():
        setattr(server, name, value)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def hub(tmp_path):
    """Return what makes a `Hub` for a server, with a cache and a token file of its own."""
    (tmp_path / "token").write_text(f"{TOKEN}\n")

    def of(server, **given):
        host, port = server.server_address
        return Hub(
            **{
                "endpoint": f"http://{host}:{port}",
                "token_file": str(tmp_path / "token"),
                "cache": str(tmp_path / "cache"),
                **given,
            }
        )

    return of


def test_a_name_is_read_from_the_hub(tmp_path, hub):
    checkpoint(tmp_path / "hub/lab/tiny")
    with served(tmp_path / "hub") as server:
        found = checkpoint_reader.read("lab/tiny", hub=hub(server))

    assert (found.config, found.stored, found.origin) == (CONFIG, STORED, "lab/tiny")
    assert found.notes == ()


def test_an_adapter_is_read_from_the_hub_by_its_config_alone(tmp_path, hub):
    folder = tmp_path / "hub/lab/sql"
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text('{"r": 16, "base_model_name_or_path": "lab/tiny"}')
    with served(tmp_path / "hub") as server:
        found = checkpoint_reader.read_adapter("lab/sql", "main", hub(server))

    assert (found.rank, found.base, found.problems) == (16, "lab/tiny", ())


def test_a_model_is_no_adapter(tmp_path, hub):
    checkpoint(tmp_path / "hub/lab/tiny")
    with served(tmp_path / "hub") as server, pytest.raises(FleetError, match="not a LoRA adapter"):
        checkpoint_reader.read_adapter("lab/tiny", "main", hub(server))


@pytest.mark.parametrize("ranges", [True, False], ids=["ranges", "no ranges"])
def test_weights_are_not_downloaded(tmp_path, hub, ranges):
    """Three files of 50 MB: their headers come, the rest stays, even where ranges do nothing."""
    sharded(tmp_path / "hub/lab/large")
    with served(tmp_path / "hub", ranges=ranges) as server:
        found = checkpoint_reader.read("lab/large", hub=hub(server))
        sent = server.sent

    assert len(found.stored) == 3
    assert sent < 3 * LARGE / (10 if ranges else 2)
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_a_header_longer_than_what_is_asked_for_first_is_read_whole(tmp_path, hub, monkeypatch):
    checkpoint(tmp_path / "hub/lab/tiny")
    monkeypatch.setattr(checkpoint_reader, "_FIRST_BYTES", 32)
    with served(tmp_path / "hub") as server:
        assert checkpoint_reader.read("lab/tiny", hub=hub(server)).stored == STORED


def test_the_cache_serves_when_the_hub_is_away(tmp_path, hub):
    checkpoint(tmp_path / "hub/lab/tiny")
    with served(tmp_path / "hub") as server:
        checkpoint_reader.read("lab/tiny", hub=hub(server))
    away = hub(server)
    offline = hub(server, offline=True)

    for source in (away, offline):
        found = checkpoint_reader.read("lab/tiny", hub=source)
        assert found.config == CONFIG
        assert found.stored is None
        assert len(found.notes) == 1


def test_a_model_without_safetensors_has_a_config_all_the_same(tmp_path, hub):
    (checkpoint(tmp_path / "hub/lab/old") / "model.safetensors").unlink()
    with served(tmp_path / "hub") as server:
        found = checkpoint_reader.read("lab/old", hub=hub(server))

    assert found.stored is None
    assert "no safetensors files" in found.notes[0]


@pytest.mark.parametrize(
    ("gated", "given", "says"),
    [
        (False, {"name": "lab/nothing"}, r"lab/nothing: http\S+ does not have this model"),
        (True, {}, r"restricted \(gated\)"),
        (False, {"offline": True}, "not in the cache"),
        (False, {"token_file": "/nothing"}, "cannot read the Hub's token"),
    ],
)
def test_the_hubs_refusals_are_sentences(tmp_path, hub, gated, given, says):
    checkpoint(tmp_path / "hub/lab/tiny")
    name = given.pop("name", "lab/tiny")
    with (
        served(tmp_path / "hub", gated=gated) as server,
        pytest.raises(FleetError, match=says) as refused,
    ):
        checkpoint_reader.read(name, hub=hub(server, **given))

    assert TOKEN not in str(refused.value)


def test_a_revision_that_is_not_there_is_named(tmp_path, hub):
    checkpoint(tmp_path / "hub/lab/tiny")
    with (
        served(tmp_path / "hub") as server,
        pytest.raises(FleetError, match="lab/tiny: the model has no revision 'v9'"),
    ):
        checkpoint_reader.read("lab/tiny", revision="v9", hub=hub(server))


def test_a_hub_that_does_not_answer_is_not_waited_for(tmp_path, hub):
    checkpoint(tmp_path / "hub/lab/tiny")
    with (
        served(tmp_path / "hub", delay=600.0) as server,
        pytest.raises(FleetError, match="did not send the model's files within 1 s"),
    ):
        checkpoint_reader.read("lab/tiny", hub=hub(server), seconds=1)


def test_headers_that_a_hub_drips_are_done_without(tmp_path, hub):
    checkpoint(tmp_path / "hub/lab/tiny")
    with served(tmp_path / "hub", drips=True) as server:
        found = checkpoint_reader.read("lab/tiny", hub=hub(server), seconds=4)

    assert (found.config, found.stored) == (CONFIG, None)
    assert "too slow" in found.notes[0]


READS = """
import sys
{first}
from gpufleet.errors import FleetError
from gpufleet.sizing import checkpoint_reader

checkpoint_reader._read_front = lambda *_: __import__("time").sleep(60)
endpoint, cache, token = sys.argv[1:]
hub = checkpoint_reader.Hub(endpoint=endpoint, cache=cache, token_file=token)
try:
    checkpoint_reader.read("lab/tiny", hub=hub, seconds=2)
except FleetError as error:
    print(error)
"""


@pytest.mark.parametrize(
    "first", ["", "from gevent import monkey; monkey.patch_all()"], ids=["threads", "gevent"]
)
def test_a_command_that_gave_a_hub_up_ends(tmp_path, hub, first):
    """The process used to wait at its end for the thread that still read."""
    checkpoint(tmp_path / "hub/lab/tiny")
    with served(tmp_path / "hub") as server:
        asked = hub(server)
        done = subprocess.run(
            [
                *(sys.executable, "-c", READS.format(first=first)),
                *(asked.endpoint, asked.cache, asked.token_file),
            ],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )

    assert "did not send the model's files within 2 s" in done.stdout


def test_a_password_in_the_endpoint_is_not_shown(tmp_path):
    hub = Hub(endpoint="http://user:a-word@127.0.0.1:9", cache=str(tmp_path))

    with pytest.raises(FleetError) as error:
        checkpoint_reader.read("org/m", hub=hub)

    assert "http://127.0.0.1:9 cannot be reached" in str(error.value)
    assert "a-word" not in str(error.value)


def test_nobody_at_the_endpoint_is_said_at_once(tmp_path, hub):
    with served(tmp_path) as server:
        pass
    with pytest.raises(FleetError, match="cannot be reached"):
        checkpoint_reader.read("lab/tiny", hub=hub(server))


@pytest.mark.parametrize("name", ["/srv/m/model-Q4_K_M.gguf", "org/name-GGUF:Q4_K_M"])
def test_files_of_gguf_are_refused_by_name(name):
    with pytest.raises(FleetError, match="cannot compute the memory of GGUF files"):
        checkpoint_reader.read(name)

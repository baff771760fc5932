"""`push` against a stand-in of the hub's API on this machine."""

from __future__ import annotations

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub
import pytest

import headwise as hw
from headwise.errors import HeadwiseError
from tests.exporting.portable import portable, saved


class Hub(BaseHTTPRequestHandler):
    """Answers what an upload asks: the repository, how to send files, the commit."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.asked.append((self.path, body, self.headers.get("Authorization")))
        host = f"http://127.0.0.1:{self.server.server_port}"
        if self.path == "/api/repos/create":
            answer = {"url": f"{host}/me/small", "name": "me/small", "id": "1"}
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            sent = [{"path": f["path"], "uploadMode": "regular"} for f in files]
            answer = {"files": [{**f, "shouldIgnore": False, "oid": None} for f in sent]}
        else:
            answer = {
                "commitUrl": f"{host}/me/small/commit/abc",
                "commitOid": "abc",
                "success": True,
            }
        self._answer(answer)

    def do_GET(self):
        self._answer({"id": "me/small", "sha": "0" * 40, "siblings": []})

    def _answer(self, data):
        text = json.dumps(data).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)  # for this one server
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.asked = []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_folder_is_pushed_with_card_and_recipe(hub, tmp_path):
    model = saved(portable("llama", (0, 2, 3), 6), tmp_path / "cut")
    made = hw.export(model, to="stock", out=tmp_path / "small", check=False)
    where = {"endpoint": f"http://127.0.0.1:{hub.server_port}", "token": "hf_test"}
    found = hw.push(made, "me/small", **where)
    assert found.commit == "abc"
    assert {"README.md", "recipe.yaml", "config.json", "model.safetensors"} <= set(found.files)
    (commit,) = [body for path, body, _ in hub.asked if "/commit/" in path]
    lines = [json.loads(line) for line in commit.splitlines()]
    sent = {x["value"]["path"]: x["value"]["content"] for x in lines if x["key"] == "file"}
    assert set(sent) == set(found.files)
    assert base64.b64decode(sent["README.md"]) == (tmp_path / "small/README.md").read_bytes()
    assert all(token == "Bearer hf_test" for *_, token in hub.asked)


def test_what_headwise_did_not_write_is_not_pushed(hub, tmp_path):
    (tmp_path / "private.txt").write_text("mine")
    with pytest.raises(HeadwiseError, match="not a folder that headwise wrote"):
        hw.push(tmp_path, "me/small")
    model = saved(portable("llama", (0, 2, 3), 6), tmp_path / "cut")
    made = hw.export(model, to="stock", out=tmp_path / "small", check=False)
    with pytest.raises(HeadwiseError, match="owner/name"):
        hw.push(made, "small")
    (tmp_path / "small/README.md").unlink()
    with pytest.raises(HeadwiseError, match="has no README"):
        hw.push(made, "me/small")
    assert hub.asked == []


def test_a_hub_that_does_not_answer_is_told(tmp_path):
    model = saved(portable("llama", (0, 2, 3), 6), tmp_path / "cut")
    made = hw.export(model, to="stock", out=tmp_path / "small", check=False)
    with pytest.raises(HeadwiseError, match="could not be pushed"):
        hw.push(made, "me/small", endpoint="http://127.0.0.1:1", token="hf_test")

"""What the hub or a folder can't give: one line, before any rank starts. A server of our own stands for the hub."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from src.errors import Refused
from src.models.hf_folder import configuration, fetched, has_weights
from tests.command import QUICK, Outcome, train
from tests.models.hf import saved

MODEL = ["model=hf_causal_lm", "data=text", "data.sequence_length=32", "data.limit=16", "trainer.micro_batch_size=2"]


class Hub(BaseHTTPRequestHandler):
    """Answers as huggingface.co does: `org/gated` is for those with rights, `org/good` has files, there is no other."""

    files: dict[str, bytes] = {}  # noqa: RUF012 - of the one server of this test
    asked: list[str] = []  # noqa: RUF012

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, with_body: bool) -> None:
        self.asked.append(self.path)
        status, headers, body = 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        if "org/gated" in self.path:
            status, headers = 403, {"X-Error-Code": "GatedRepo"}
        elif self.path.startswith("/api/models/org/good/tree"):
            tree = [{"type": "file", "path": n, "size": len(b), "oid": "0" * 40} for n, b in self.files.items()]
            status, headers, body = 200, {"Content-Type": "application/json"}, json.dumps(tree).encode()
        elif self.path.startswith("/api/models/org/good"):
            siblings = [{"rfilename": name} for name in self.files]
            told = {"id": "org/good", "sha": "0" * 40, "siblings": siblings, "private": False}
            status, headers, body = 200, {"Content-Type": "application/json"}, json.dumps(told).encode()
        elif "org/good" in self.path:
            name = self.path.rsplit("/", 1)[1]
            status, headers, body = 404, {"X-Error-Code": "EntryNotFound"}, b""
            if name in self.files:
                status, headers, body = 200, {"ETag": f'"{name}"', "X-Repo-Commit": "0" * 40}, self.files[name]
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        """Nothing to stderr."""


@contextmanager
def hub(folder: Path | None = None) -> Iterator[str]:
    """Its address. folder: whose files `org/good` has."""
    Hub.files = {path.name: path.read_bytes() for path in folder.iterdir()} if folder else {}
    Hub.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def train_by_name(tmp_path: Path, name: str, address: str, *overrides: str) -> Outcome:
    environment = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": None}
    return train(tmp_path, *QUICK, *MODEL, f"model.name={name}", *overrides, **environment)


def assert_refused(outcome: Outcome, words: str) -> None:
    """Exit code 2, the words in the only line, no run folder."""
    heading, line = outcome.stderr.strip().splitlines()
    assert heading == "shardlab refused to start:"
    assert words in line
    assert outcome.code == 2
    assert outcome.run_dirs() == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("org/gated", "model.name=org/gated: the hub gives it only to those who have accepted its terms."),
        ("org/other", "model.name=org/other is no folder here, and the hub has no such model"),
    ],
)
def test_what_the_hub_does_not_give_is_one_line(tmp_path: Path, name: str, words: str) -> None:
    with hub() as address:
        assert_refused(train_by_name(tmp_path, name, address), words)


def test_a_hub_out_of_reach_is_one_line(tmp_path: Path) -> None:
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    outcome = train(tmp_path, *QUICK, *MODEL, "model.name=org/good", **environment)
    assert_refused(outcome, "is no folder here nor in the hub's cache, and the hub can't be reached")


@pytest.mark.slow
def test_a_model_of_the_hub_is_fetched_once_for_all_ranks_and_runs(tmp_path: Path) -> None:
    with hub(saved(tmp_path / "llama")) as address:
        first = train_by_name(tmp_path, "org/good", address)
        assert first.code == 0, first.text
        gets = [path for path in Hub.asked if path.endswith("model.safetensors")]
        assert "HTTP Request" not in first.text
        asked = len(Hub.asked)
        second = train_by_name(tmp_path, "org/good", address)
        assert second.code == 0, second.text
        assert len(Hub.asked) == asked, "what the cache holds is asked for no more"
    assert len(gets) == 2  # HEAD and GET


def test_no_such_folder_is_one_line(tmp_path: Path) -> None:
    assert_refused(train(tmp_path, *QUICK, *MODEL, "model.name=./nowhere"), "model.name=./nowhere is no folder here.")


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"is a folder without config.json"):
        configuration(str(tmp_path), {})


def test_a_folder_without_weights_is_one_line(tmp_path: Path) -> None:
    (saved(tmp_path / "llama") / "model.safetensors").unlink()
    assert_refused(train(tmp_path, *QUICK, *MODEL, "model.name=llama"), "model.name=llama holds no weights")


def test_a_folder_that_lacks_one_of_its_listed_files_has_no_weights(tmp_path: Path) -> None:
    folder = saved(tmp_path / "llama")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    files = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert not has_weights(folder)
    with pytest.raises(Refused, match="with all files that it lists"):
        fetched(str(folder))
    (folder / "model-00002-of-00002.safetensors").touch()
    assert has_weights(folder)


def test_a_configuration_that_says_no_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(Refused, match=r"config.json describes no model that transformers knows"):
        configuration(str(tmp_path), {})


def test_nothing_that_says_what_the_model_is_is_refused() -> None:
    with pytest.raises(Refused, match=r"model.name=null: nothing says what the model is"):
        configuration(None, {"hidden_size": 8})

"""The few answers of a W&B server that its client needs to follow a run online, and what it was told.

The protocol is wandb-core's (GraphQL for the run, file_stream for what is logged), as version 0.31 speaks it.
"""

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Server(ThreadingHTTPServer):
    """runs: the variables of each request to create or change a run. streams: what was sent for its files.

    falls_silent: once a run is known, requests are taken and left without an answer.
    """

    daemon_threads = True

    def __init__(self, falls_silent: bool) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.runs: list[dict[str, Any]] = []
        self.streams: list[dict[str, Any]] = []
        self.falls_silent = falls_silent
        self.released = threading.Event()  # the end: nobody waits any longer

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def history(self) -> list[dict[str, Any]]:
        """Every line of logged metrics, in order."""
        files = [stream.get("files", {}).get("wandb-history.jsonl") for stream in self.streams]
        return [json.loads(line) for file in files if file for line in file["content"]]

    def answer(self, path: str, request: dict[str, Any]) -> dict[str, Any]:
        if path.endswith("/file_stream"):
            self.streams.append(request)
            return {}
        if "upsertBucket" in request.get("query", ""):
            given = request["variables"]
            self.runs.append(given)
            project = {"id": "p", "name": given.get("project"), "entity": {"name": "someone", "id": "e"}}
            bucket = {"id": "b", "name": given.get("name"), "displayName": given.get("displayName"), "project": project}
            return {"data": {"upsertBucket": {"bucket": {**bucket, "config": "{}"}, "inserted": True}}}
        if "createRunFiles" in request.get("query", ""):
            files = [{"name": name, "uploadUrl": f"{self.url}/{name}"} for name in request["variables"]["files"]]
            return {"data": {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}}
        return {"data": {}}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.server.falls_silent and self.server.runs:
            self.server.released.wait()
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        is_json = "json" in self.headers.get("Content-Type", "")
        request = json.loads(body) if is_json and self.command == "POST" else {}
        answer = json.dumps(self.server.answer(self.path, request)).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_PUT = do_POST  # noqa: N815 - the base class's name for an upload

    def log_message(self, format: str, *arguments: Any) -> None:
        return None


@contextmanager
def wandb_server(falls_silent: bool = False) -> Iterator[Server]:
    with Server(falls_silent) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.released.set()
            server.shutdown()
            thread.join()

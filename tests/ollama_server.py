"""A stand-in for Ollama's OpenAI-compatible API, in a process of its own: `with ollama(...) as server`.

It answers as Ollama does where clients notice: an unknown model is a 404 with a JSON error, whose `type` is
"not_found_error" and whose `code` is null; `/v1/models` lists what was pulled; `/readyz` and the like are
plain "404 page not found"; unknown request keys are ignored; `system_fingerprint` is "fp_ollama". What the
model writes comes from `answers`, the source of a Python function that gets the request and returns a text,
or a dict {"status", "body"} for the server's own answer, which `completion` and `error` make.

    python ollama_server.py PORT_FILE ANSWERS_FILE LOG_FILE
"""

import contextlib
import json
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

MODELS = ("llama3.2:1b",)
START_LIMIT_S = 30.0


@dataclass(frozen=True)
class Ollama:
    """Where the server listens, and what it was asked."""

    url: str
    log: Path

    @property
    def endpoint(self) -> str:
        return f"{self.url}/v1"

    def requests(self) -> list[dict[str, Any]]:
        """The chat requests so far, in the order of their arrival."""
        return [json.loads(line) for line in self.log.read_text().splitlines()]


@contextlib.contextmanager
def ollama(folder: Path, answers: str) -> Iterator[Ollama]:
    """A server whose model answers by function `answer(request, text)` of the source `answers`.

    `text` is the user's message. The process ends with the block.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port, source, log = folder / "port", folder / "answers.py", folder / "requests.jsonl"
    source.write_text(textwrap.dedent(answers))
    log.touch()
    process = subprocess.Popen([sys.executable, __file__, str(port), str(source), str(log)])
    try:
        deadline_s = time.monotonic() + START_LIMIT_S
        while not port.exists():
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"the Ollama stand-in did not start (exit code {process.poll()})")
            time.sleep(0.02)
        yield Ollama(f"http://127.0.0.1:{port.read_text()}", log)
    finally:
        process.kill()
        process.wait()


def completion(model: str, content: str) -> dict[str, Any]:
    """A chat completion in Ollama's form."""
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": "fp_ollama",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
        ],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }


def error(message: str, kind: str) -> dict[str, Any]:
    """An error in Ollama's form."""
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


class Handler(BaseHTTPRequestHandler):
    """Set by `main`: `answer`, `log`, `lock`."""

    protocol_version = "HTTP/1.1"
    answer: Callable[[dict[str, Any], str], Any]
    log: Path
    lock = threading.Lock()

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            models = [{"id": name, "object": "model", "created": 1, "owned_by": "library"} for name in MODELS]
            self._send(200, {"object": "list", "data": models})
        else:
            self._send(404, "404 page not found")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.path != "/v1/chat/completions":
            return self._send(404, "404 page not found")
        try:
            request = json.loads(body)
        except ValueError as wrong:
            return self._send(400, error(str(wrong), "invalid_request_error"))
        if not request.get("messages"):
            return self._send(400, error("[] is too short - 'messages'", "invalid_request_error"))
        if request.get("model") not in MODELS:
            name = request.get("model")
            return self._send(
                404, error(f'model "{name}" not found, try pulling it first', "not_found_error")
            )
        with self.lock, self.log.open("a") as log:
            log.write(json.dumps(request) + "\n")
        answer = type(self).answer(request, request["messages"][-1]["content"])
        if isinstance(answer, dict):
            return self._send(answer["status"], answer["body"])
        return self._send(200, completion(request["model"], answer))

    def _send(self, status: int, body: Any) -> None:
        text = body if isinstance(body, str) else json.dumps(body)
        data = text.encode()
        self.send_response(status)
        self.send_header("content-type", "text/plain" if isinstance(body, str) else "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


def main(port_file: Path, answers: Path, log: Path) -> None:
    scope: dict[str, Any] = {"completion": completion, "error": error}
    exec(answers.read_text(), scope)
    Handler.answer, Handler.log = staticmethod(scope["answer"]), log
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    aside = port_file.with_suffix(".aside")
    aside.write_text(str(server.server_address[1]))
    aside.replace(port_file)
    server.serve_forever()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))

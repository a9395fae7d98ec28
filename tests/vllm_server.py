"""A real vLLM server on the CPU, with a tiny model that writes at random: `with vllm_server(...) as url`."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from tiny import tiny_checkpoint
from transformers import AutoTokenizer

START_LIMIT_S = 500.0
MODEL = "tiny-judge"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_CI_ENV": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def chat_checkpoint(folder: Path) -> Path:
    """A tiny model for 2048 tokens, its tokenizer with a chat template."""
    tiny_checkpoint(folder, hidden=128, heads=2, kv_heads=1)  # vLLM's CPU attention takes heads of 64
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@contextlib.contextmanager
def vllm_server(folder: Path) -> Iterator[str]:
    """vLLM's OpenAI server for such a model, named `MODEL`; gives its URL. It ends with the block."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(chat_checkpoint(folder / "model")), "--served-model-name", MODEL]
    command += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--max-num-seqs", "8"]
    command += ["--kv-cache-memory-bytes", str(64 << 20), "--dtype", "float32"]
    command += ["--distributed-executor-backend", "uni"]  # no process for the worker: it starts sooner
    # A schema allows any white space, and a model that writes at random would write nothing else.
    command += ["--structured-outputs-config", '{"disable_any_whitespace": true, "backend": "xgrammar"}']
    with log.open("wb") as out:
        # A session of its own: its engine process ends with it.
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env=os.environ | ENVIRONMENT, start_new_session=True
        )
    try:
        _wait(process, f"http://127.0.0.1:{port}/health", log)
        yield f"http://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline_s = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            break
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(0.5)
    raise RuntimeError(f"vLLM did not start (exit code {process.poll()}):\n{log.read_text()[-4000:]}")

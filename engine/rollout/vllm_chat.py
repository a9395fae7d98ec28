"""A vLLM engine that answers chat requests, in a thread of its own; it knows no Ray and opens no port."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from rolemesh.engine.rollout.vllm import VLLMSpec, make_engine

Answer = tuple[str, str | None]  # the text, and why it ended ("stop", "length")


class ChatRefused(ValueError):
    """A request that this engine can never answer; the message says why."""


class ChatEngine:
    """Answers requests in the form of OpenAI's chat completions, as many together as the engine takes.

    Keys that count: `messages`, `temperature`, `max_tokens`, `seed`, `response_format` (json_schema) and
    `structured_outputs` (regex). Raises ChatRefused for a folder without a chat template.
    """

    def __init__(self, spec: VLLMSpec) -> None:
        self.spec = spec
        from transformers import AutoTokenizer  # not needed by those who start an engine elsewhere

        self.tokenizer = AutoTokenizer.from_pretrained(spec.path, trust_remote_code=False)
        if not self.tokenizer.chat_template:
            raise ChatRefused(f"{spec.path} has no chat template: it cannot be asked")
        self._names = itertools.count()
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._open: dict[str, Future[Answer]] = {}
        self._failure: BaseException | None = None
        ready: Future[None] = Future()
        threading.Thread(target=self._run, args=(ready,), daemon=True, name="chat-engine").start()
        ready.result()

    def ask(self, body: Mapping[str, Any]) -> Future[Answer]:
        """The answer to a request, to come; ChatRefused in it for one that cannot be answered."""
        answer: Future[Answer] = Future()
        self._tasks.put(lambda: self._add(body, answer))
        return answer

    def sleep(self) -> Future[None]:
        """Give the devices' memory back until the next request; done when it is. Nothing on a CPU."""
        done: Future[None] = Future()
        self._tasks.put(lambda: self._sleep(done))
        return done

    def _run(self, ready: Future[None]) -> None:
        """The thread: it alone touches vLLM."""
        try:
            self._llm = make_engine(
                self.spec,
                skip_tokenizer_init=False,
                load_format="auto",
                # A schema allows any white space, and a model at a loss writes nothing else.
                structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
            )
            self._asleep = False
        except BaseException as error:
            ready.set_exception(error)
            return
        ready.set_result(None)
        while True:
            if not self._open:
                self._tasks.get()()
            while not self._tasks.empty():
                self._tasks.get()()
            try:
                self._step()
            except BaseException as error:  # nothing more comes of this engine: who asks has to know
                self._failure = error
                for answer in self._open.values():
                    answer.set_exception(error)
                self._open.clear()

    def _add(self, body: Mapping[str, Any], answer: Future[Answer]) -> None:
        if self._failure is not None:
            answer.set_exception(self._failure)
            return
        name = str(next(self._names))
        try:
            if self._asleep:
                self._llm.wake_up()
                self._asleep = False
            tokens = self._tokens(body)
            self._llm.add_request(name, {"prompt_token_ids": tokens}, self._params(body, len(tokens)))
        except Exception as error:  # vLLM's own word on what is wrong with the request
            refused = error if isinstance(error, ChatRefused) else ChatRefused(str(error))
            answer.set_exception(refused)
            return
        self._open[name] = answer

    def _tokens(self, body: Mapping[str, Any]) -> list[int]:
        template: Any = self.tokenizer.apply_chat_template
        asked = template(list(body["messages"]), add_generation_prompt=True, tokenize=False)
        tokens: list[int] = self.tokenizer(asked, add_special_tokens=False)["input_ids"]
        if len(tokens) >= self.spec.max_tokens:
            raise ChatRefused(
                f"a question of {len(tokens)} tokens: the engine takes {self.spec.max_tokens}, question and "
                "answer together"
            )
        return tokens

    def _params(self, body: Mapping[str, Any], n_prompt: int) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        constraint: dict[str, Any] = {}
        if (form := body.get("response_format")) is not None:
            constraint = {"json": form["json_schema"]["schema"]}
        elif (form := body.get("structured_outputs")) is not None:
            constraint = {"regex": form["regex"]}
        return SamplingParams(
            temperature=float(body.get("temperature", 0.0)),
            max_tokens=min(int(body["max_tokens"]), self.spec.max_tokens - n_prompt),
            seed=body.get("seed"),
            output_kind=RequestOutputKind.FINAL_ONLY,
            structured_outputs=StructuredOutputsParams(**constraint) if constraint else None,
        )

    def _step(self) -> None:
        """Let every open request write a token."""
        if not self._open:
            return
        for output in self._llm.step():
            if output.finished:
                written = output.outputs[0]
                self._open.pop(output.request_id).set_result((written.text, written.finish_reason))

    def _sleep(self, done: Future[None]) -> None:
        try:
            if self.spec.sleeps and not self._asleep and not self._open:
                self._llm.sleep(level=1)
                self._asleep = True
            done.set_result(None)
        except Exception as error:
            done.set_exception(error)

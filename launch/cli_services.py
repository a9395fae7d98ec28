"""Commands that serve over HTTP: `serve-rm`, `serve-ref`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from rolemesh.launch.services.backend import Backend, Kind

Dtype = Literal["auto", "float32", "bfloat16", "float16"]

Host = Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is every one of this machine.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one and prints it.")]
TokenEnv = Annotated[str, typer.Option(help="Ask for the bearer token in this environment variable.")]
TokenFile = Annotated[Path | None, typer.Option(help="Ask for the bearer token in this file.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...; default: a GPU where there is one.")]
DtypeOption = Annotated[Dtype, typer.Option(help="Of the weights; auto: as they are stored.")]
Revision = Annotated[str | None, typer.Option(help="Revision of a model of the hub.")]
MaxLength = Annotated[
    int | None, typer.Option(min=1, help="Most tokens of a sample; default: the model's positions.")
]
BatchTokens = Annotated[int, typer.Option(min=1, help="Most tokens of a batch, padding included.")]
WaitMs = Annotated[float, typer.Option(min=0, help="How long a sample waits for others, in ms.")]
MaxSamples = Annotated[int, typer.Option(min=1, help="Most samples of a request.")]
MaxWaiting = Annotated[int, typer.Option(min=1, help="Most samples that wait; above it 429 is answered.")]
MaxBodyMb = Annotated[int, typer.Option(min=1, help="Most megabytes of a request.")]
AnswerS = Annotated[float, typer.Option(min=0.001, help="Longest time from a request to its answer, in s.")]
DrainS = Annotated[float, typer.Option(min=0.001, help="On SIGTERM, longest time for open requests, in s.")]


def add_commands(main: typer.Typer) -> None:
    """Make them commands of `rolemesh`."""
    main.command("serve-rm")(serve_rm)
    main.command("serve-ref")(serve_ref)


def serve_rm(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A reward checkpoint (folder or hub name), or a scorer: file.py:function."
        ),
    ],
    host: Host = "127.0.0.1",
    port: Port = 5000,
    token_env: TokenEnv = "",
    token_file: TokenFile = None,
    head: Annotated[str, typer.Option(help="Name of the checkpoint's reward head.")] = "score",
    revision: Revision = None,
    device: Device = "",
    dtype: DtypeOption = "auto",
    max_length: MaxLength = None,
    batch_tokens: BatchTokens = 16384,
    wait_ms: WaitMs = 5.0,
    max_samples: MaxSamples = 1024,
    max_waiting: MaxWaiting = 4096,
    max_body_mb: MaxBodyMb = 32,
    answer_s: AnswerS = 300.0,
    drain_s: DrainS = 60.0,
    workers: Annotated[int, typer.Option(min=1, help="Of a scorer: processes.")] = 2,
    limit_s: Annotated[float, typer.Option(min=0.001, help="Of a scorer: longest call, in s.")] = 30.0,
    default_score: Annotated[
        float | None,
        typer.Option(help="Of a scorer: score after a call that hung or died; default: an error."),
    ] = None,
) -> int:
    """Serve rewards over HTTP: of a reward model, or of a Python function."""

    def load() -> Backend:
        if ".py:" in model:
            from rolemesh.launch.services.scorer_file import ScorerFile

            return ScorerFile(model, workers=workers, limit_s=limit_s, default_score=default_score)
        from rolemesh.launch.services.checkpoint import find_folder
        from rolemesh.launch.services.reward_model import RewardModel

        return RewardModel(
            model,
            find_folder(model, revision),
            head=head,
            dtype=dtype,
            device=_device(device),
            batch_tokens=batch_tokens,
            max_length=max_length,
        )

    limits = _limits(max_samples, max_waiting, max_body_mb, wait_ms, answer_s, drain_s)
    kind: Kind = "function" if ".py:" in model else "reward"
    return _serve(kind, model, load, host, port, limits, token_env, token_file)


def serve_ref(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A causal model: a folder or hub name.")],
    host: Host = "127.0.0.1",
    port: Port = 5001,
    token_env: TokenEnv = "",
    token_file: TokenFile = None,
    revision: Revision = None,
    device: Device = "",
    dtype: DtypeOption = "auto",
    max_length: MaxLength = None,
    batch_tokens: BatchTokens = 16384,
    wait_ms: WaitMs = 5.0,
    max_samples: MaxSamples = 1024,
    max_waiting: MaxWaiting = 4096,
    max_body_mb: MaxBodyMb = 32,
    answer_s: AnswerS = 300.0,
    drain_s: DrainS = 60.0,
) -> int:
    """Serve a causal model's log-probs of given token ids over HTTP: a reference outside of the cluster."""

    def load() -> Backend:
        from rolemesh.launch.services.checkpoint import find_folder
        from rolemesh.launch.services.reference_model import ReferenceModel

        return ReferenceModel(
            model,
            find_folder(model, revision),
            dtype=dtype,
            device=_device(device),
            batch_tokens=batch_tokens,
            max_length=max_length,
        )

    limits = _limits(max_samples, max_waiting, max_body_mb, wait_ms, answer_s, drain_s)
    return _serve("reference", model, load, host, port, limits, token_env, token_file)


def _limits(
    max_samples: int, max_waiting: int, max_body_mb: int, wait_ms: float, answer_s: float, drain_s: float
) -> Any:
    from rolemesh.launch.services.service import ServerLimits

    return ServerLimits(
        samples=max_samples,
        waiting=max_waiting,
        body_bytes=max_body_mb << 20,
        wait_s=wait_ms / 1e3,
        answer_s=answer_s,
        drain_s=drain_s,
    )


def _serve(
    kind: Kind,
    model: str,
    load: Callable[[], Backend],
    host: str,
    port: int,
    limits: Any,
    token_env: str,
    token_file: Path | None,
) -> int:
    from rolemesh.launch.services.run import read_token, serve

    token = read_token(token_env, token_file)
    return serve(kind, model, load, host=host, port=port, limits=limits, token=token)


def _device(asked: str) -> str:
    import torch

    return asked or ("cuda" if torch.cuda.is_available() else "cpu")

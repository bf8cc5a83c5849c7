"""``arbordraft serve``: an OpenAI-compatible server with a web page."""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import typer

from arbordraft.cli.options import (
    AutoDtypeOption,
    CorpusOption,
    DeviceOption,
    DrafterOption,
    KernelsOption,
    SettingsOption,
    WeightsOption,
)
from arbordraft.kernels.progress import phase
from arbordraft.utils.choices import Kernels, Settings
from arbordraft.utils.terminal import terminal

_LIBRARIES = ("fastapi", "openai", "prometheus_client", "uvicorn")


def serve(
    model: Annotated[str, typer.Argument(help="Hub name, folder or GGUF file of a causal LM.")] = "smollm2",
    drafter: DrafterOption = "auto",
    corpus: CorpusOption = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is open to the network.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for any free port.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="ARBORDRAFT_API_KEY", help="Key that clients must send; by default none."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Model name for clients; by default that of MODEL.")] = None,
    max_samples: Annotated[int, typer.Option(min=1, help="Most answers decoded at a time.")] = 64,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            show_default="65536, and the states of recurrent layers",
            help="Most tokens in the cache; bounds memory.",
        ),
    ] = None,
    max_rows: Annotated[
        int | None,
        typer.Option(
            min=1,
            show_default="as many as take 0.2 s",
            help="Most prompt tokens read between two steps; bounds how long streams stall.",
        ),
    ] = None,
    max_waiting: Annotated[int, typer.Option(min=0, help="Requests that may wait; more are refused with 429.")] = 256,
    max_body: Annotated[int, typer.Option(min=1, help="Longest body of a request, in bytes.")] = 4 * 2**20,
    cors: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="Origin whose web pages may ask, as http://localhost:3000, or * for all; repeatable. By default none.",
        ),
    ] = None,
    default_tokens: Annotated[
        int, typer.Option(min=1, help="Longest answer to a request without limit, in tokens.")
    ] = 1024,
    reasoning: Annotated[
        Literal["auto", "off"],
        typer.Option(help="'auto' separates thoughts from answers by the model's marks; 'off' leaves texts alone."),
    ] = "auto",
    grace: Annotated[float, typer.Option(min=0, help="Seconds for running answers to end at shutdown.")] = 30.0,
    dtype: AutoDtypeOption = None,
    device: DeviceOption = None,
    kernels: KernelsOption = Kernels.auto,
    weights: WeightsOption = None,
    generation_config: SettingsOption = Settings.model,
) -> None:
    """Serve a model to OpenAI clients. A web page chats and draws every step.

    Ctrl-C or SIGTERM stops the server after running answers have ended; a second Ctrl-C stops it at once.
    """
    check_libraries()
    with phase("importing torch, transformers and fastapi"):
        from arbordraft.cli.decoders import load_decoder
        from arbordraft.decoding.engine import Engine
        from arbordraft.decoding.measuring import rows_within
        from arbordraft.serving.app import build_app
        from arbordraft.serving.middleware import cors_options
        from arbordraft.serving.server import Server, bound, url_of
        from arbordraft.serving.service import Service

    cors_options(cors or ())  # refuses a wrong origin before the model is loaded
    console = terminal(highlight=False, soft_wrap=True)
    with bound(host, port) as listener:
        decoder = load_decoder(
            model,
            drafter,
            corpus=corpus,
            dtype=dtype,
            device=device,
            kernels=kernels,
            weights=weights,
            generation_config=generation_config,
        )
        decoder.decider.expect(sys.maxsize)  # a server decodes much: measures the costs of steps now
        rows = max_rows or rows_within(decoder.target)
        tokens = max_tokens or decoder.stepper.usual_tokens(max_samples)
        with phase("compiling kernels and recording steps"):
            decoder.warm_up(max_samples, tokens)
        engine = Engine(
            decoder, max_cache_tokens=tokens, max_samples=max_samples, max_rows=rows, max_waiting=max_waiting
        )
        service = Service(engine, name or _name(model), default_tokens, reasoning=reasoning == "auto")
        url = url_of(listener)
        app = build_app(service, api_key=api_key, max_body=max_body, cors=cors or ())

        def ready() -> None:
            console.print(f"{decoder.target.chosen}", style="dim")
            console.print(f"{service.name} is at {url}/v1, its page at {url}")

        Server(app, grace=grace, ready=ready).run(sockets=[listener])


def check_libraries() -> None:
    """Raises ImportError if a library of the server is missing."""
    if missing := [library for library in _LIBRARIES if find_spec(library) is None]:
        raise ImportError(f"serving needs {', '.join(missing)}; run: pip install 'arbordraft[serve]'")


def _name(model: str) -> str:
    path = Path(model)
    return path.resolve().name if path.exists() else model

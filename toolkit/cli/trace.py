"""``arbordraft trace``: writes an answer with all of its steps as an HTML page."""

from pathlib import Path
from typing import Annotated

import typer

from arbordraft.cli.options import (
    AutoDtypeOption,
    DrafterOption,
    KernelsOption,
    ModelOption,
    SettingsOption,
    TemperatureOption,
    TopPOption,
    WeightsOption,
    output_file,
)
from arbordraft.kernels.progress import phase
from arbordraft.utils.choices import Kernels, Settings
from arbordraft.utils.files import write_text
from arbordraft.utils.terminal import terminal


def trace(
    prompt: Annotated[str, typer.Argument(help="Prompt to answer.")],
    output: Annotated[Path, typer.Option("--output", "-o", callback=output_file, help="HTML page to write.")] = Path(
        "trace.html"
    ),
    model: ModelOption = "smollm2",
    drafter: DrafterOption = "auto",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 128,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the answer; by default a random one.")] = None,
    dtype: AutoDtypeOption = None,
    kernels: KernelsOption = Kernels.auto,
    weights: WeightsOption = None,
    generation_config: SettingsOption = Settings.model,
) -> None:
    """Write a page with every step of an answer. It shows drafted, accepted and rejected tokens."""
    with phase("importing torch and transformers"):
        from arbordraft.cli.decoders import load_decoder
        from arbordraft.decoding.engine import Engine
        from arbordraft.decoding.requests import Request
        from arbordraft.decoding.text import encode, user_turn
        from arbordraft.serving.page import page
    from arbordraft.serving.deltas import AnswerDelta, AnswerDetokenizer

    console = terminal(highlight=False, soft_wrap=True)
    with console.status("loading the model") as status:
        decoder = load_decoder(
            model, drafter, dtype=dtype, kernels=kernels, weights=weights, generation_config=generation_config
        )
        tokenizer = decoder.target.tokenizer
        assert tokenizer is not None
        request = Request(
            prompt=encode(tokenizer, user_turn(prompt, None), raw=False),
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
        )
        status.update("answering")
        detokenizer, answer = AnswerDetokenizer(tokenizer, (), 1, steps=True), AnswerDelta(0)
        for event in Engine(decoder).submit(request):
            answer += detokenizer(event)
    fields = {"prompt": prompt, "text": answer.text, "steps": answer.steps}
    write_text(output, page({"model": model, "exactness": decoder.coupling.exactness.value, **fields}))
    console.print(f"{len(answer.tokens)} tokens in {len(answer.steps)} steps: wrote {output}")

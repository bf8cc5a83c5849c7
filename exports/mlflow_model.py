"""A decoder as MLflow serves it: prompts in, texts with their tau out."""

from pathlib import Path
from typing import Any

import pandas
from mlflow.models import ModelSignature
from mlflow.pyfunc import PythonModel, PythonModelContext
from mlflow.types import ColSpec, ParamSchema, ParamSpec, Schema

from arbordraft.bench.decoding import answers
from arbordraft.decoding.prompts import left_padded
from arbordraft.decoding.text import encode, settings_of, user_turn
from arbordraft.exports.decoder_config import FILE, DecoderConfig

FILES = "decoder"  # name of the artifact
PROMPT, TEXT, TAU, TOKENS = "prompt", "text", "tau", "tokens"
DEFAULTS: dict[str, Any] = {"max_new_tokens": 128, "temperature": 0.0, "seed": 0, "raw": False}


class DecoderModel(PythonModel):  # type: ignore[misc]  # MLflow is not type-checked here
    """Builds the decoder from its artifacts, and decodes every request as one ragged batch.

    ``params`` of a request: ``max_new_tokens``, ``temperature`` (0 decodes greedily), ``top_p``, ``seed`` and ``raw``.
    ``top_p`` is the model's own by default. ``seed`` is that of the first prompt; the next prompt has the next seed.
    ``raw`` leaves out the chat template.
    """

    def load_context(self, context: PythonModelContext) -> None:
        """Builds the decoder."""
        folder = Path(context.artifacts[FILES])
        self.decoder, self.tokenizer = DecoderConfig.load(folder / FILE).build(folder)

    # Without type hints of the arguments: MLflow would derive another signature from them.
    def predict(self, context, model_input, params=None):  # type: ignore[no-untyped-def]
        """Returns one row with text, tau and number of tokens for every prompt.

        Args:
            context: unused.
            model_input: a data frame with a column of prompts.
            params: see :class:`DecoderModel`.
        """
        return answer(self.decoder, self.tokenizer, model_input, params or {})


def signature(decoder: Any) -> Any:
    """Returns the signature of requests and answers, which MLflow checks."""
    kinds, own = {int: "long", float: "double", bool: "boolean"}, decoder.own_settings.top_p
    known = DEFAULTS | {"top_p": 1.0 if own is None else float(own)}
    params = ParamSchema([ParamSpec(name, kinds[type(value)], value) for name, value in known.items()])
    outputs = [ColSpec("string", TEXT), ColSpec("double", TAU), ColSpec("long", TOKENS)]
    return ModelSignature(Schema([ColSpec("string", PROMPT)]), Schema(outputs), params)


def example() -> tuple[pandas.DataFrame, dict[str, Any]]:
    """Returns a request as an example."""
    return pandas.DataFrame({PROMPT: ["Why is the sky blue?"]}), {"max_new_tokens": 16}


def answer(decoder: Any, tokenizer: Any, model_input: pandas.DataFrame, params: dict[str, Any]) -> pandas.DataFrame:
    """Decodes the prompts of a data frame; see :class:`DecoderModel`.

    Raises:
        ValueError: if a parameter is out of range.
    """
    prompts = [str(prompt) for prompt in model_input[PROMPT]]
    if not prompts:
        return pandas.DataFrame({TEXT: [], TAU: [], TOKENS: []})
    asked = DEFAULTS | params
    texts = [encode(tokenizer, user_turn(prompt, None), raw=asked["raw"]) for prompt in prompts]
    settings = settings_of(
        int(asked["max_new_tokens"]),
        asked["temperature"],
        asked.get("top_p"),
        None,
        int(asked["seed"]),
        len(prompts),
        decoder.own_settings,
    )
    inputs = {name: tensor.to(decoder.target.device) for name, tensor in left_padded(texts).items()}
    output = decoder.generate(**inputs, **settings, return_dict_in_generate=True)
    stats = output.stats
    return pandas.DataFrame(
        {
            TEXT: tokenizer.batch_decode(answers(output, inputs), skip_special_tokens=True),
            TAU: [count / max(1, steps) for count, steps in zip(stats.emitted, stats.forwards, strict=True)],
            TOKENS: list(stats.emitted),
        }
    )

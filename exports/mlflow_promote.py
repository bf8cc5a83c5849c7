"""The gate before the champion: a candidate passes if nothing is lost and something is gained, both measured now."""

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from arbordraft.exports.evaluation import HELD_OUT, Evaluation, evaluate
from arbordraft.exports.mlflow_registry import server, source_of
from arbordraft.utils.mlflow_server import CANDIDATE

if TYPE_CHECKING:
    from mlflow import MlflowClient

METRICS = ("tau", "tokens_per_second")
CHAMPION = "champion"


class Promotion(NamedTuple):
    """Whether a champion was replaced, and why."""

    promoted: bool
    reason: str


def promote_decoder(
    name: str,
    prompts: Sequence[str] = HELD_OUT,
    *,
    by: Sequence[str] = METRICS,
    margin: float = 0.02,
    new_tokens: int = 64,
    uri: str | None = None,
    tell: Callable[[str], object] = lambda what: None,
) -> Promotion:
    """Gives the alias ``champion`` to the ``candidate`` if it passes.

    Both decode the prompts here and now: figures of other machines or other prompts would decide nothing. A candidate
    has to say what its target says, token for token, and to be better than the champion in one of the metrics. Where
    speed is one of them, it has to be faster than plain decoding, too, also if there is no champion yet.

    Args:
        name: registered model.
        prompts: held-out prompts.
        by: metrics of which one has to be higher: ``tau``, ``tokens_per_second``.
        margin: by which share higher; measured speeds differ by a few percent between two runs of the same decoder.
        new_tokens: longest answer.
        uri: tracking server; by default as in :func:`~arbordraft.exports.mlflow_log.log_decoder`.
        tell: is told what is going on.

    Raises:
        ImportError: if MLflow is not installed.
        ValueError: if there is no such metric.
        Exception: whatever MLflow raises, if the server does not answer or does not know the model.
    """
    if not by or (unknown := set(by) - set(METRICS)):
        raise ValueError(f"decoders are promoted by {' or '.join(METRICS)}, not by {sorted(unknown) if by else 'none'}")
    with server(uri) as (_, client):
        aliases = {alias: str(version) for alias, version in client.get_registered_model(name).aliases.items()}
        candidate, champion = aliases.get(CANDIDATE), aliases.get(CHAMPION)
        if candidate is None:
            return Promotion(False, f"{name} has no version with the alias candidate")
        if candidate == champion:
            return Promotion(False, f"version {champion} is the champion already")

        def measure(version: str) -> Evaluation:
            decoder, tokenizer = load_decoder(client, name, version)
            return evaluate(
                decoder, tokenizer, prompts, new_tokens=new_tokens, tell=lambda what: tell(f"version {version}: {what}")
            )

        measured = measure(candidate)
        bar = measure(champion) if measured.parity and champion is not None else None
        verdict = judge(candidate, measured, champion, bar, by, margin)
        client.set_model_version_tag(name, candidate, "arbordraft.promotion", verdict.reason)
        client.set_model_version_tag(name, candidate, "arbordraft.evaluation", json.dumps(measured.report()))
        if verdict.promoted:
            client.set_registered_model_alias(name, CHAMPION, candidate)
        return verdict


def judge(
    candidate: str, measured: Evaluation, champion: str | None, bar: Evaluation | None, by: Sequence[str], margin: float
) -> Promotion:
    """Whether a candidate becomes champion: what it does was ``measured``, and ``bar`` is what the champion does."""
    if not measured.parity:
        said = f"{measured.equal} of {measured.prompts} answers are the target's own"
        return Promotion(False, f"version {candidate} fails parity: {said}, its output law is {measured.exactness}")
    speeds = f"{measured.tokens_per_second:.4g} tokens/s against {measured.plain_tokens_per_second:.4g}"
    slow = measured.tokens_per_second <= measured.plain_tokens_per_second * (1 + margin)
    if slow and "tokens_per_second" in by:
        return Promotion(False, f"version {candidate} is no faster than plain decoding by {margin:.0%}: {speeds}")
    if bar is None:
        told = f"tau {measured.tau:.2f}, {speeds} of plain decoding"
        return Promotion(True, f"version {candidate} is the first champion: {told}")
    shown = [f"{metric} {getattr(measured, metric):.4g} against {getattr(bar, metric):.4g}" for metric in by]
    better = any(getattr(measured, metric) > getattr(bar, metric) * (1 + margin) for metric in by)
    told = f"{', '.join(shown)} of version {champion}"
    verdict = "is champion" if better else f"is no better by {margin:.0%}"
    return Promotion(better, f"version {candidate} {verdict}: {told}")


def load_decoder(client: "MlflowClient", name: str, version: str) -> Any:
    """The decoder of a registered version, and its tokenizer.

    Raises:
        ValueError: if the version is something else, or its target has changed.
    """
    import mlflow

    registered = client.get_model_version(name, version)
    model = mlflow.pyfunc.load_model(source_of(client, registered))
    served = model.unwrap_python_model()
    if not hasattr(served, "decoder"):
        raise ValueError(f"version {version} of {name} is no decoder that arbordraft logged")
    return served.decoder, served.tokenizer

"""What is written beside the weights for people: how they are served."""

import json

from arbordraft.exports.checkpoints import EAGLE, MEDUSA

_METHODS = {EAGLE: "eagle3", MEDUSA: "medusa"}


def card(engine: str, kind: str, layout: str, target: str, speculative_tokens: int) -> str:
    """Contents of ``README.md``.

    Args:
        engine: ``vllm`` or ``sglang``.
        kind: ``model_type`` of the drafter.
        layout: of an EAGLE head.
        target: hub name or folder.
        speculative_tokens: length of the chains.
    """
    command = command_line(engine, kind, layout, target, "THIS_FOLDER", speculative_tokens)
    text = f"# Drafter for {target}\n\nWritten by arbordraft for {engine}:\n\n```\n{command}\n```\n"
    if engine == "vllm" and kind != EAGLE:
        text += "\nvLLM guesses what a drafter is: keep 'eagle-', 'eagle3', 'dflash' and 'dspark' out of its path.\n"
    return text


def command_line(engine: str, kind: str, layout: str, target: str, folder: str, speculative_tokens: int) -> str:
    """How an engine is started with the drafter; the arguments are those of :func:`card` and the drafter's folder."""
    if engine == "sglang":
        algorithm = "EAGLE3" if kind == EAGLE else "STANDALONE"
        return (
            f"python -m sglang.launch_server --model-path {target} --speculative-algorithm {algorithm} \\\n"
            f"  --speculative-draft-model-path {folder} --speculative-num-steps {speculative_tokens} \\\n"
            f"  --speculative-eagle-topk 1 --speculative-num-draft-tokens {speculative_tokens + 1}"
        )
    if layout == "speculators":
        return f"vllm serve {folder}"
    settings = {
        "method": _METHODS.get(kind, "draft_model"),
        "model": folder,
        "num_speculative_tokens": speculative_tokens,
    }
    return f"vllm serve {target} --speculative-config '{json.dumps(settings)}'"

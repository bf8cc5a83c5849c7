"""Describes the model that a drafter drafts for by its configuration; weights are not read."""

from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig

from arbordraft.checkpoints.smollm2 import HUB_REPO, fetch_smollm2
from arbordraft.heads.base import CompanionConfig
from arbordraft.utils.choices import SMALL


@dataclass(frozen=True)
class Target:
    """A target as its configuration describes it; its weights are not read.

    Args:
        name: hub name or folder, as an engine would load it.
        config: settings of its language model.
        architectures: names of its classes.
    """

    name: str
    config: Any
    architectures: list[str]


def describe_target(name: str) -> Target:
    """Reads a target's configuration.

    Args:
        name: hub name or folder; ``smollm2`` means SmolLM2-135M-Instruct.

    Raises:
        ValueError: if there is no such model.
    """
    known, place = (HUB_REPO, str(fetch_smollm2())) if name == SMALL else (name, name)
    try:
        config = AutoConfig.from_pretrained(place)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"the target {name!r} cannot be read ({error}); name its folder or its hub name") from error
    return Target(known, config.get_text_config(), list(config.architectures or []))


def check_fit(companion: CompanionConfig, target: Target) -> None:
    """Raises ValueError if a network of these settings cannot draft for this target."""
    for what, ours, theirs in (
        ("a vocabulary", companion.vocab_size, target.config.vocab_size),
        ("hidden states of size", companion.target_hidden_size, target.config.hidden_size),
    ):
        if ours != theirs:
            raise ValueError(
                f"the drafter was made for {what} {ours}, the target {target.name} has {theirs}; name the target that "
                "it was trained for with --target"
            )

"""A training that takes a second: a tiny target that chats, prompts for it, and settings for what learns from it."""

import json
import random
from pathlib import Path
from string import ascii_letters
from typing import Any

import yaml
from models import EOS, tiny, tiny_tokenizer

from arbordraft import EagleDrafter, RaggedModel, SpeculativeDecoder, builders
from arbordraft.training.cli import run
from arbordraft.training.data import SelfDistillationDataModule
from arbordraft.training.distillation import Recipe
from arbordraft.training.drafter_module import DrafterModule, Phase
from arbordraft.training.students import EagleStudent
from arbordraft.training.targets import Target

TEMPLATE = (
    "{% for message in messages %}"
    "{{ 'd' + message.content + 'e' if message.role == 'user' else 'f' + message.content + 'c' }}"
    "{% endfor %}{{ 'f' if add_generation_prompt else '' }}"
)
RECIPE = {"conversations": 12, "per_shard": 4, "max_new_tokens": 20, "max_tokens": 64}


def save_target(folder: Path, seed: int = 0) -> Path:
    """A model that is sure of what it says, with a tokenizer that knows a chat template."""
    tiny(seed=seed, sharpness=4.0, max_position_embeddings=256).save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token, tokenizer.chat_template = ascii_letters[EOS], TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def save_prompts(path: Path, count: int = 12, length: int = 12) -> Path:
    """Users who say random words."""
    source = random.Random(0)
    words = ["".join(source.choices(ascii_letters[6:], k=length + number % 5)) for number in range(count)]
    path.write_text("\n".join(json.dumps({"messages": [{"role": "user", "content": word}]}) for word in words))
    return path

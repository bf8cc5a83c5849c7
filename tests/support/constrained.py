"""Decoders of every kind that write in grammars, and a stateful processor."""

from functools import cache

import torch

import arbordraft as ad
from arbordraft import builders
from arbordraft.deciders import FixedDepth
from arbordraft.drafters import GrammarDrafter, HybridDrafter
from arbordraft.grammars import Grammar
from support.models import PAYS, generated
from support.spellers import speller, speller_tokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["cat", "dog", "axolotl"]},
        "tags": {"type": "array", "items": {"enum": ["one", "two"]}, "maxItems": 2},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}
GRAMMARS = [Grammar.json_schema(PERSON), None, Grammar.regex("[a-c]{2}(, [a-c]{2}){3}")]
TEXTS = ["Ada is one cat, a cat. ", "yes yes no", '{"name": "Ada", "age": 36, "kind": "cat"}']
TREE = ad.TreeTopology.from_k_config((2, 2, 1, 1))
LENGTH = 60


def draft():
    return ad.LanguageModelDrafter(speller(seed=3))


def exit_early():
    return ad.EarlyExitDrafter(speller(), 1)


class Resting(FixedDepth):
    def rests(self, memory):
        return True


DECODERS = {
    "lookup, chain": lambda: ad.SpeculativeDecoder(speller(), ad.NGramDrafter()),
    "lookup, tree": lambda: ad.SpeculativeDecoder(speller(), ad.NGramDrafter(shortest=1), TREE),
    "model, chain": lambda: ad.SpeculativeDecoder(speller(), draft(), ad.TreeTopology.chain(3), ad.Coupling.shared()),
    "model, tree": lambda: ad.SpeculativeDecoder(speller(), draft(), TREE),
    "head, tree": lambda: ad.SpeculativeDecoder(speller(), exit_early(), TREE),
    "forced alone": lambda: ad.SpeculativeDecoder(speller(), GrammarDrafter()),
    "forced, else model": lambda: ad.SpeculativeDecoder(speller(), HybridDrafter(GrammarDrafter(), draft()), TREE),
    "lookup, else model": lambda: ad.SpeculativeDecoder(speller(), HybridDrafter(ad.NGramDrafter(), draft()), TREE),
    "fitted, with lookups": lambda: builders.cost_aware(speller(), draft(), lookup=True, costs=PAYS),
    "lookup, by costs": lambda: builders.lookup(speller(), PAYS),
}


def decoded(decoder, temperature, grammar=None, **options):
    """Returns the new tokens of every sample, and the stats."""
    prompts = [speller_tokenizer()(text).input_ids for text in TEXTS]
    options |= {"seeds": [11, 12, 13], "grammar": GRAMMARS if grammar is None else grammar}
    options |= {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    tokens, output = generated(decoder, prompts, max_new_tokens=LENGTH, **options)
    return tokens, output.stats


@cache
def plainly(temperature):
    return decoded(builders.plain(speller()), temperature)[0]


def only(scores, rest):
    banned = torch.arange(scores.shape[-1]) % 3 != rest
    return scores.masked_fill(banned, -torch.inf)


class Following:
    """Allows ids with ``id % 3 == count % 3``; the number of accepted tokens, ``count``, is its state."""

    def __init__(self, count=0):
        self.count = count

    def fork(self):
        return type(self)(self.count)

    def accept(self, token):
        self.count += 1

    def __call__(self, scores):
        return only(scores, self.count % 3)

"""A sample that fails or must end early changes neither the texts nor the acceptance of its neighbours."""

import pytest
import torch
from support.every_drafter import EVERY, TRANSLATED, pair, translated
from support.models import LETTERS, PROMPTS, VOCAB, tiny_tokenizer

import arbordraft as ad
from arbordraft.decoding.engine import Engine
from arbordraft.decoding.runner import state_tokens
from arbordraft.drafters.native_models import native_model

pytestmark = [
    pytest.mark.usefixtures("kernels"),
    pytest.mark.filterwarnings("ignore:the drafter produced NaN"),
]

TREE = ad.TreeTopology.from_k_config((2, 1, 1, 1, 1))
CHAIN = ad.TreeTopology.chain(6)
POSITIONS = 26  # room for a draft or two after the bad text, and for all drafts after its neighbours
NEIGHBOURS = [PROMPTS[0], PROMPTS[2]]
BAD = torch.randint(3, VOCAB, (POSITIONS - 3,), generator=torch.Generator().manual_seed(4)).tolist()
NEW = 14

# Drafters whose poison would reach the target, or each of their own rows, as LFM2's head is its embeddings.
UNPOISONED = ("early exit", "self", "model, windows", "model, lfm2")


def poison(drafter):
    """Makes the drafter compute NaN for the bad text: by its hidden states, or by one of its tokens."""
    if drafter.hidden_layers:
        bad, add, take = set(), drafter.add, drafter.take_hidden

        def added(state, sample, tokens, handle):
            (bad.add if list(tokens) == BAD else bad.discard)(sample)
            add(state, sample, tokens, handle)

        def taken(state, hidden):
            nan = float("nan")
            take(state, {n: states * nan if n in bad else states for n, states in hidden.items()})

        drafter.add, drafter.take_hidden = added, taken
        return
    model = drafter.model
    ids = model.tokenizer(tiny_tokenizer().decode(BAD))["input_ids"] if model.tokenizer else BAD
    table = model.model.get_input_embeddings().weight
    for token in ids:
        before = table[token].clone()
        with torch.no_grad():
            table[token] = float("nan")
        model.refresh()
        if model.backend == "torch" or native_model(model) is not None:  # its probe reads a few tokens, too
            return
        with torch.no_grad():
            table[token] = before
    raise AssertionError("there is no token to poison")


def outcomes(target, drafter, mode, prompts):
    """Returns tokens, forwards, drafts and accepted drafts of each answer, all decoded in one batch."""
    law = ad.Fixed(2) if drafter.certain else ad.IID(2)
    coupling = ad.Coupling(law, ad.Lifted(ad.RecursiveRejection())) if mode == "random" else ad.Coupling.shared(2)
    topology = CHAIN if mode == "random" else TREE
    decoder = ad.SpeculativeDecoder(target, drafter, topology, coupling)
    states = state_tokens(target, drafter)
    rows = sum(len(prompt) + NEW + topology.num_nodes + states for prompt in prompts)
    engine = Engine(decoder, max_cache_tokens=rows, max_samples=len(prompts), reuse=False)  # as tight as it gets
    temperature = 0.0 if mode == "greedy" else 0.9
    streams = [
        engine.submit(ad.Request(prompt=prompt, max_new_tokens=NEW, temperature=temperature, seed=len(prompt), ends=()))
        for prompt in prompts
    ]
    engine.run()
    answers = [stream.result()[0] for stream in streams]
    return [(answer.tokens, answer.stats.forwards, answer.stats.drafted, answer.stats.accepted) for answer in answers]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("mode", ["greedy", "shared", "random"])
@pytest.mark.parametrize("name", EVERY)
def test_a_text_near_the_last_position_harms_no_other(name, mode):
    target, drafter = pair(name, POSITIONS)
    alone = outcomes(target, drafter, mode, NEIGHBOURS)
    first, bad, second = outcomes(target, drafter, mode, [NEIGHBOURS[0], BAD, NEIGHBOURS[1]])
    assert [first, second] == alone
    assert bad == outcomes(target, drafter, mode, [BAD])[0]
    assert bad[2] < min(first[2], second[2])  # it must end early


@pytest.mark.one_in(3)
@pytest.mark.parametrize("mode", ["greedy", "shared", "random"])
@pytest.mark.parametrize("name", [name for name in EVERY if not name.startswith(UNPOISONED)])
def test_a_text_whose_drafts_are_not_numbers_harms_no_other(name, mode):
    target, drafter = pair(name)
    poison(drafter)
    alone = outcomes(target, drafter, mode, NEIGHBOURS)
    first, bad, second = outcomes(target, drafter, mode, [NEIGHBOURS[0], BAD, NEIGHBOURS[1]])
    assert [first, second] == alone
    assert bad == outcomes(target, drafter, mode, [BAD])[0]
    assert min(first[2], second[2]) > 0 == bad[3]


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("kind", TRANSLATED)
def test_a_text_without_tokens_on_the_other_side_harms_no_other(kind, kernels):
    """Special tokens alone decode to no text."""
    target, drafter = translated(kind, kernels)
    target.tokenizer.add_special_tokens({"eos_token": LETTERS[2]})
    alone = outcomes(target, drafter, "greedy", NEIGHBOURS)
    first, bad, second = outcomes(target, drafter, "greedy", [NEIGHBOURS[0], [2, 2], NEIGHBOURS[1]])
    assert [first, second] == alone
    assert bad == outcomes(target, drafter, "greedy", [[2, 2]])[0]

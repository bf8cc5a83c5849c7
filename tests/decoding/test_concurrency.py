"""Threads, re-entrance, exceptions and forks: decoding never changes the model."""

import asyncio
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from textwrap import dedent

import pytest
import torch
from support.models import PROMPTS, fusable, left_padded, ragged
from transformers import LogitsProcessorList

import arbordraft as ad
from arbordraft.deciders import Heuristic
from arbordraft.drafters.network import ModelNetwork
from arbordraft.target.cache import RaggedKVCache

pytestmark = pytest.mark.timeout(120)

TREE = ad.TreeTopology([-1, 0, 0, 1, 1, 2])
GREEDY = ad.Coupling.matching(2)
SAMPLED = ad.Coupling(ad.WithoutReplacement(2), ad.Lifted(ad.RecursiveRejection()))
NEW = {"max_new_tokens": 12, "eos_token_id": None, "pad_token_id": 0}


def lookup(target, **options):
    return ad.SpeculativeDecoder(target, ad.NGramDrafter(), TREE, GREEDY, Heuristic(), **options)


def draft_model(target, **options):
    return ad.SpeculativeDecoder(target, ad.LanguageModelDrafter(ragged(seed=3)), TREE, SAMPLED, **options)


def early_exit(target, **options):
    return ad.SpeculativeDecoder(target, ad.EarlyExitDrafter(target, 1), TREE, SAMPLED, **options)


def nothing(target, **options):
    return ad.SpeculativeDecoder(target, ad.NoDrafter(), ad.TreeTopology.chain(0), GREEDY, **options)


DECODERS = {
    "lookup": (lookup, {}),
    "draft model": (draft_model, {}),
    "early exit": (early_exit, {}),
    "no drafts": (nothing, {}),
    "packed, early exit": (early_exit, {"kernels": "auto"}),
    "packed, lookup": (lookup, {"kernels": "auto"}),
    "static": (draft_model, {"buckets": (8, 16, 32)}),
}


def built(kind):
    build, options = DECODERS[kind]
    options = dict(options)
    model = fusable()
    target = ad.RaggedModel(model, kernels=options.pop("kernels", "torch"))
    return build(target, **options), model


def answers(decoder, seed=0):
    """Decodes a ragged batch, greedily and by sampling."""
    inputs = left_padded(PROMPTS)
    greedy = decoder.generate(**inputs, **NEW, do_sample=False)
    if isinstance(decoder.drafter, ad.NGramDrafter | ad.NoDrafter) and decoder.stepper.fixed:
        return greedy.tolist()
    sampled = decoder.generate(**inputs, **NEW, do_sample=True, seeds=[seed, seed + 1, seed + 2])
    return greedy.tolist(), sampled.tolist()


def own(model):
    ids = torch.tensor([PROMPTS[0]])
    return model.generate(ids, attention_mask=torch.ones_like(ids), **NEW, do_sample=False).tolist()


@cache
def known(kind):
    """Returns the answers of an undisturbed decoder and of its model."""
    decoder, model = built(kind)
    return answers(decoder), own(model)


def structure(model):
    attributes = [(id(m), {k: id(v) for k, v in vars(m).items()}, list(map(id, m.children()))) for m in model.modules()]
    return attributes, model.config._attn_implementation


def at_once(*works, rounds=3):
    """Runs each function several times in its own thread, all starting together; returns all results."""
    barrier = threading.Barrier(len(works))

    def run(work):
        barrier.wait()
        return [work() for _ in range(rounds)]

    with ThreadPoolExecutor(len(works)) as pool:
        return [result for results in pool.map(run, works) for result in results]


PARTNERS = ["the same decoder", "another decoder", "another wrapper", "the model itself"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("partner", PARTNERS)
@pytest.mark.parametrize("kind", DECODERS)
def test_two_threads_on_one_model(kind, partner):
    decoder, model = built(kind)
    expected, plain, before = answers(decoder), own(model), structure(model)
    kernels = DECODERS[kind][1].get("kernels", "torch")
    another = lookup(ad.RaggedModel(model, kernels=kernels) if partner == "another wrapper" else decoder.target)
    other, wanted = {
        "the same decoder": (partial(answers, decoder), expected),
        "another decoder": (partial(answers, another), answers(another)),
        "another wrapper": (partial(answers, another), answers(another)),
        "the model itself": (partial(own, model), plain),
    }[partner]
    found = at_once(partial(answers, decoder), other)
    assert found == [expected] * 3 + [wanted] * 3
    assert structure(model) == before
    assert own(model) == plain


def test_wrapping_a_model_while_it_decodes():
    """Prepacking observes only the forwards of its own copy."""
    decoder, model = built("packed, lookup")
    expected, plain = answers(decoder), own(model)

    def wrap():
        return ad.RaggedModel(model, kernels="auto").row_invariant

    found = at_once(partial(answers, decoder), partial(own, model), wrap)
    assert found == [expected] * 3 + [plain] * 3 + [decoder.target.row_invariant] * 3


def test_asyncio():
    decoder, _ = built("early exit")
    expected = answers(decoder)

    async def gather():
        return await asyncio.gather(*(asyncio.to_thread(answers, decoder) for _ in range(4)))

    assert asyncio.run(gather()) == [expected] * 4


def test_weights_that_change_between_requests_of_two_threads():
    """A running request keeps the packed weights it began with; a later request sees the change."""
    decoder, model = built("packed, lookup")
    began, go_on = threading.Event(), threading.Event()
    inputs = left_padded(PROMPTS)
    before = decoder.generate(**inputs, **NEW, do_sample=False).tolist()

    class Waiting:
        def put(self, tokens):
            began.set()
            assert go_on.wait(60)

        def end(self):
            pass

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(decoder.generate, **inputs, **NEW, do_sample=False, streamer=[Waiting()] * 3)
        assert began.wait(60)
        with torch.no_grad():
            for layer in model.model.layers:
                layer.mlp.down_proj.weight.mul_(-1.5)
        with pytest.warns(UserWarning, match="changed after they were prepacked"):
            after = decoder.generate(**inputs, **NEW, do_sample=False).tolist()
        go_on.set()
        assert running.result().tolist() == before
    assert after != before
    assert after == answers(lookup(ad.RaggedModel(model, kernels="auto")))[0]


# Re-entrance


def test_decoding_within_a_streamer_and_a_processor():
    decoder, model = built("early exit")
    expected, plain = answers(decoder)[0], own(model)
    seen = []

    class Curious:
        def put(self, tokens):
            seen.append((answers(decoder)[0], own(model)))

        def end(self):
            pass

    def ask(ids, scores):
        seen.append((expected, own(model)))
        return scores

    inputs = left_padded(PROMPTS)
    found = decoder.generate(
        **inputs, **NEW, do_sample=False, streamer=[Curious()] * 3, logits_processor=LogitsProcessorList([ask])
    )
    assert found.tolist() == expected
    assert len(seen) > 10
    assert all(pair == (expected, plain) for pair in seen)


# Exceptions at any point


class Fault(BaseException):
    """An exception like KeyboardInterrupt, which no handler for errors catches."""


def faulty(original, countdown):
    def called(*args, **kwargs):
        countdown[0] -= 1
        if countdown[0] == 0:
            raise Fault
        return original(*args, **kwargs)

    return called


PLACES = {
    "the target's forward": (ad.RaggedModel, "run"),
    "the cache's layout": (RaggedKVCache, "lay_out"),
    "the cache's commit": (RaggedKVCache, "commit"),
    "a new sample": (RaggedKVCache, "open"),
    "the end of a sample": (RaggedKVCache, "close"),
    "keys and values": (RaggedKVCache, "pools"),
    "the drafts": (ad.EarlyExitDrafter, "scores"),
    "the drafts' forward": (ModelNetwork, "run_batch"),
    "the drafter's commit": (ad.EarlyExitDrafter, "commit"),
    "the verdict": (ad.Coupling, "forward"),
    "an inner linear": (torch.nn.Linear, "forward"),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("call", [1, 2, 7])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["early exit", "packed, early exit"])
def test_an_exception_leaves_everything_as_it_was(kind, place, call, monkeypatch):
    (decoder, model), (expected, plain) = built(kind), known(kind)
    before = structure(model)
    owner, name = PLACES[place]
    countdown = [call]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, faulty(getattr(owner, name), countdown))
        try:
            answers(decoder)
        except Fault:
            assert countdown[0] <= 0
    assert structure(model) == before
    assert own(model) == plain
    assert answers(decoder) == expected


# Other processes


FORKED = """
    import os, sys, torch
    sys.path[:0] = {paths!r}
    from support.models import tiny
    from arbordraft import NoDrafter, RaggedModel
    from test_concurrency import nothing, own
    torch.set_num_threads(2)
    decoder = nothing(RaggedModel(tiny()))
    ids = torch.tensor([[5, 6, 7]])
    expected = decoder.generate(ids, max_new_tokens=4, do_sample=False)
    torch.ones(1000, 1000) @ torch.ones(1000, 1000)
    for threads, outcome in ((2, "spawn"), (1, "same")):
        child = os.fork()
        if child == 0:
            if threads == 1:
                torch.set_num_threads(1)
            try:
                found = decoder.generate(ids, max_new_tokens=4, do_sample=False)
                os._exit(0 if outcome == "same" and torch.equal(found, expected) else 3)
            except RuntimeError as error:
                os._exit(0 if outcome in str(error) else 4)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status == 0, (threads, status)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not fork")
def test_a_forked_child_does_not_hang(request):
    folder = request.path.parent
    script = dedent(FORKED.format(paths=[str(folder.parent), str(folder)]))
    subprocess.run([sys.executable, "-c", script], check=True, timeout=100)


def test_copies_have_a_model_of_their_own():
    import copy
    import pickle

    decoder, model = built("packed, lookup")
    expected, plain = answers(decoder), own(model)
    for twin in (copy.deepcopy(decoder), pickle.loads(pickle.dumps(decoder))):
        with torch.no_grad():
            twin.target.model.lm_head.weight.neg_()
        with pytest.warns(UserWarning, match="changed after they were prepacked"):
            assert answers(twin) != expected
        assert (answers(decoder), own(model)) == (expected, plain)

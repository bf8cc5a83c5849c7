"""Deciders: when they stop, that each sample stops for itself, and that the output does not notice."""

import math

import pytest
import torch
from models import PROMPTS, VOCAB, greedy_reference, left_padded, new_tokens, ragged

from arbordraft import (
    Backoff,
    ConfidenceThreshold,
    Coupling,
    Decider,
    EntropyBound,
    Fixed,
    FixedDepth,
    LanguageModelDrafter,
    NGramDrafter,
    RecursiveRejection,
    SpeculativeDecoder,
    StepView,
    TopDown,
    TreeTopology,
    WithoutReplacement,
)
from arbordraft.drafters.base import Garden
from arbordraft.types import Draw, History, Origin

CERTAIN, FAIR = torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.5])


def view(depth=1, confidence=((1.0,),), rows=None, history=None):
    rows = rows or [[None] * len(nodes) for nodes in confidence]
    paths = [
        [(Draw(probability, Origin(row)),) for probability, row in zip(nodes, theirs, strict=True)]
        for nodes, theirs in zip(confidence, rows, strict=True)
    ]
    return StepView(depth, paths, history or [History() for _ in confidence])


def test_fixed_depth():
    three = ((1.0,),) * 3
    assert FixedDepth()(view(99, three)) == [True] * 3
    assert [FixedDepth(2)(view(depth, three)) for depth in (0, 1, 2)] == [[True] * 3, [True] * 3, [False] * 3]
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        FixedDepth(-1)


def test_confidence_threshold():
    """One confident node is enough for a sample to go on; the threshold itself is confident."""
    confidence = ((0.1, 0.5), (0.1, 0.39), (0.4,))
    assert ConfidenceThreshold(0.4)(view(confidence=confidence)) == [True, False, True]
    with pytest.raises(ValueError, match="must be a probability"):
        ConfidenceThreshold(1.5)


def test_entropy_bound():
    """1 - sqrt(0.2 ln 2) = 0.628; the surest row of a sample decides, and a root has no row."""
    rows = ((FAIR,), (FAIR, CERTAIN), (None,))
    step = view(confidence=((0.5,), (0.5, 1.0), (1.0,)), rows=rows)
    assert step.entropy == [[pytest.approx(math.log(2))], [pytest.approx(math.log(2)), 0.0], [0.0]]
    assert EntropyBound(threshold=0.62)(step) == [True, True, True]
    assert EntropyBound(threshold=0.63)(step) == [False, True, True]
    with pytest.raises(ValueError, match="gamma be positive"):
        EntropyBound(gamma=0)


def test_backoff_pauses_for_ever_longer():
    """Two failures, then pauses of 1, 2, 4, 4, ... steps with one failing attempt between them; a success ends it."""
    decider, history, drafted = Backoff(patience=2, longest=4), History(), []
    for step in range(21):
        goes_on = decider(view(history=[history]))[0]
        drafted.append(int(goes_on))
        history.record(drafted=goes_on, accepted=step == 18)
    assert drafted == [1, 1, 0, 1, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0]
    history.record(drafted=True, accepted=True)
    assert decider(view(history=[history])) == [True]
    with pytest.raises(ValueError, match="must be positive"):
        Backoff(patience=0)


class Alternating(Decider):
    """Sample ``b`` drafts ``b`` levels: the most ragged batch there is."""

    def forward(self, view):
        stopped = len(PROMPTS) - len(view.history)  # those with the smaller numbers
        return [stopped + index > view.depth for index in range(len(view.history))]


def draft_model_decoder(decider):
    coupling = Coupling(WithoutReplacement(2), TopDown(RecursiveRejection()))
    topology = TreeTopology.from_k_config((2, 2, 1))
    return SpeculativeDecoder(ragged(), LanguageModelDrafter(ragged(seed=3)), topology, coupling, decider)


@pytest.mark.parametrize(
    "decider",
    [FixedDepth(0), FixedDepth(1), ConfidenceThreshold(0.05), EntropyBound(0.2), Backoff(1, 2), Alternating()],
    ids=lambda decider: type(decider).__name__,
)
def test_the_output_does_not_notice(decider):
    output = draft_model_decoder(decider).generate(
        **left_padded(PROMPTS), max_new_tokens=10, do_sample=False, return_dict_in_generate=True
    )
    stats = output.stats
    assert new_tokens(output.sequences, PROMPTS, stats.emitted) == greedy_reference(
        ragged().model, PROMPTS, max_new_tokens=10
    )
    assert (stats.pad_rows, stats.pad_keys) == (0, 0)
    assert stats.rows == stats.drafted + sum(stats.forwards)


def test_every_sample_drafts_its_own_length():
    decoder, lengths = draft_model_decoder(Alternating()), []
    propose = decoder.drafter.propose

    def record(state, context):
        tree = propose(state, context)
        lengths.append(tree.lengths)
        return tree

    decoder.drafter.propose = record
    decoder.generate(**left_padded(PROMPTS), max_new_tokens=20, do_sample=False, eos_token_id=None)
    assert lengths[0] == [1, 3, 7]


def test_a_decoder_remembers_how_drafting_went():
    """A drafter that is always wrong is asked, after its first failure, every second and then every third step."""
    decoder, lengths = draft_model_decoder(Backoff(patience=1, longest=2)), []
    (tokens,) = greedy_reference(ragged().model, PROMPTS[:1], max_new_tokens=8, eos_token_id=None)
    wrong = next(token for token in range(VOCAB) if token not in tokens)

    def propose(state, context):
        garden = Garden(context, Fixed(1))
        for sample in garden.frontier(0):
            garden.plant(sample, 0, [wrong], [1.0], None)
        lengths.extend(garden.tree().lengths)
        return garden.tree()

    decoder.drafter.propose = propose
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
    stats = decoder.generate(torch.tensor(PROMPTS[:1]), **options).stats
    assert lengths == [2, 1, 2, 1, 1, 2, 1, 1]
    assert (stats.tried, stats.acceptance_by_depth) == ({1: 3}, [0.0])


def test_nothing_is_drafted_at_depth_zero():
    decoder = draft_model_decoder(FixedDepth(0))
    output = decoder.generate(**left_padded(PROMPTS), max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
    assert (output.stats.drafted, output.stats.tau, output.stats.acceptance_by_depth) == (0, 1.0, [])


def test_a_decider_that_looks_ahead_is_refused():
    class Peeking(FixedDepth):
        anticipating = True

    with pytest.raises(ValueError, match="looks at tokens that are still to be verified"):
        SpeculativeDecoder(
            ragged(),
            NGramDrafter(),
            TreeTopology.chain(1),
            Coupling(Fixed(1), TopDown(RecursiveRejection())),
            Peeking(),
        )

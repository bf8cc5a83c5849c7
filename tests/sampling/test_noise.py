"""Noise, inverse-CDF draws, and logits processors on the rows of a tree."""

import math
import sys

import pytest
import torch
from transformers.generation import (
    EncoderRepetitionPenaltyLogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from arbordraft.decoding.generate import Stopping
from arbordraft.sampling.kinds import is_static
from arbordraft.sampling.noise import Noise, draw, residual
from arbordraft.sampling.processors import LogitsPipeline
from arbordraft.sampling.stateful import PathState
from arbordraft.testing import row

LAST = math.nextafter(1, 0)  # the greatest uniform


@pytest.mark.parametrize(
    ("weights", "uniform", "token"),
    [
        ((1, 1, 2), 0.0, 0),
        ((1, 1, 2), 0.25, 1),
        ((1, 1, 2), 0.49, 1),
        ((1, 1, 2), 0.5, 2),
        ((1, 1, 2), LAST, 2),
        ((0, 0, 3), 0.0, 2),
        ((1, 2, 0, 0), LAST, 1),
        ((0, 1, 0, 1, 0), 0.5, 3),
        ((0, 1e-300, 0), 0.7, 1),
    ],
)
def test_draw_inverts_the_distribution(weights, uniform, token):
    assert draw(torch.tensor(weights, dtype=torch.float64), uniform) == token


def test_draw_returns_the_last_possible_token_when_the_product_rounds_up():
    """The greatest uniform times a total of 3 subnormals is the total itself."""
    weights = torch.tensor([1.0, 2.0, 0.0], dtype=torch.float64) * 5e-324
    assert LAST * weights.sum().item() == weights.sum().item()
    assert draw(weights, LAST) == 1


def test_draw_keeps_the_tail_of_a_large_float32_vocabulary():
    """In a float32 sum, small weights after a large one would vanish."""
    weights = torch.full((150_000,), 1e-9)
    weights[0] = 1.0
    small = weights[1:].double().sum().item()
    assert draw(weights, 1 - small / 2) == pytest.approx(75_000, abs=50)
    assert draw(weights, LAST) == 149_999


@pytest.mark.parametrize("weights", [(0.0, 0.0), (math.nan, 1.0), (math.inf, 1.0)])
def test_draw_refuses_weights_without_a_law(weights):
    with pytest.raises(ValueError, match="cannot draw"):
        draw(torch.tensor(weights), 0.5)


def test_residual_is_the_positive_part():
    assert residual(row(1, 2, 1), row(2, 1, 1)).tolist() == [0, 0.25, 0]


def generators(*seeds):
    return [Noise.source(seed) for seed in seeds]


def test_noise_of_a_sample_does_not_depend_on_its_batch():
    alone, batch = Noise.draw(generators(7), 5), Noise.draw(generators(3, 7, 4), 5)
    for purpose in ("draft", "accept", "final"):
        mine, theirs = getattr(alone, purpose), getattr(batch, purpose)
        assert mine.dtype == torch.float64
        assert mine.shape == (1, 5)
        assert torch.equal(mine[0], theirs[1])


def test_noise_is_drawn_anew_for_every_step_and_purpose():
    (generator,) = generators(0)
    steps = [Noise.draw([generator], 4) for _ in range(3)]
    uniforms = [value for n in steps for u in (n.draft, n.accept, n.final) for value in u.flatten().tolist()]
    assert len(set(uniforms)) == len(uniforms) == 36


def test_noise_of_an_empty_batch():
    noise = Noise.draw([], 4)
    assert noise.final.shape == (0, 4)
    assert noise.final.dtype == torch.float64


# Processors.

PATHS = [[1, 2, 3], [1, 2, 3, 1], [1, 2, 3, 1, 2], [1, 2, 3, 5]]
LOGITS = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class LengthBias:
    """Depends on the length of the path alone, and changes its scores in place."""

    def __call__(self, input_ids, scores):
        scores[:, input_ids.shape[1] % scores.shape[1]] += 3.0
        return scores


class GreedyTopK(TopKLogitsWarper):
    """Reads the path, although its base class ignores it."""

    def __call__(self, input_ids, scores):
        return super().__call__(input_ids, scores.index_fill(1, input_ids[0], -torch.inf))


@pytest.mark.parametrize(
    "processors",
    [
        [],
        [RepetitionPenaltyLogitsProcessor(1.7)],
        [NoRepeatNGramLogitsProcessor(2)],
        [LengthBias()],
        [GreedyTopK(3)],
        [TemperatureLogitsWarper(0.5), TopKLogitsWarper(5), TopPLogitsWarper(0.8), MinPLogitsWarper(0.01)],
        [RepetitionPenaltyLogitsProcessor(1.7), NoRepeatNGramLogitsProcessor(2), TopPLogitsWarper(0.7), LengthBias()],
    ],
    ids=lambda processors: "+".join(type(p).__name__ for p in processors) or "none",
)
def test_every_row_is_processed_along_its_own_path(processors):
    chain, before = LogitsProcessorList(processors), LOGITS.clone()
    found = LogitsPipeline(chain)(LOGITS, PATHS.__getitem__)
    for index, path in enumerate(PATHS):
        expected = chain(torch.tensor([path]), LOGITS[[index]].clone())
        torch.testing.assert_close(found[[index]], expected, atol=0, rtol=0)
    assert torch.equal(LOGITS, before)


def test_paths_are_looked_up_only_if_needed():
    def path_of(row):
        raise AssertionError("no processor needs the path")

    LogitsPipeline([TemperatureLogitsWarper(0.5), TopKLogitsWarper(2)], batch_size=3)(LOGITS, path_of)
    assert LogitsPipeline([LengthBias()])(LOGITS[:0], path_of).shape == (0, 8)


@pytest.mark.parametrize(
    ("dtype", "expected"), [(torch.bfloat16, torch.float32), (torch.float32,) * 2, (torch.float64,) * 2]
)
def test_scores_are_at_least_float32(dtype, expected):
    assert LogitsPipeline([TemperatureLogitsWarper(0.5)])(LOGITS.to(dtype), PATHS.__getitem__).dtype == expected


@pytest.mark.parametrize(
    "processor", [SynthIDTextWatermarkLogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor]
)
def test_processors_that_keep_a_state_are_refused(processor):
    for cls in (processor, type("Mine", (processor,), {})):
        with pytest.raises(ValueError, match=f"{processor.__name__} cannot judge"):
            LogitsPipeline([cls.__new__(cls)])


def test_processors_that_index_the_batch_get_all_its_rows():
    bound = PrefixConstrainedLogitsProcessor(lambda row, ids: [row, row + 1, 7], num_beams=1)
    for number in range(3):
        found = LogitsPipeline([bound], batch_size=3, row=number)(LOGITS, PATHS.__getitem__)
        assert [line.isfinite().nonzero().flatten().tolist() for line in found] == [[number, number + 1, 7]] * 4


def test_processors_that_keep_prompts_refuse_padding():
    keeping = EncoderRepetitionPenaltyLogitsProcessor(2.0, torch.tensor([[1, 2], [3, 4]]))
    found = LogitsPipeline([keeping], batch_size=2, row=1)(LOGITS, PATHS.__getitem__)
    assert (found != LOGITS).any(dim=0).nonzero().flatten().tolist() == [3, 4]
    with pytest.raises(ValueError, match=r"EncoderRepetitionPenalty.* decode one prompt at a time"):
        LogitsPipeline([keeping], batch_size=2, row=1, padding=1)


def average(input_ids, scores):
    return scores.mean(dim=0)


class Silent:
    def __call__(self, input_ids, scores):
        scores[:, 0] = 0.0


class Stuck:
    def fork(self):
        return self

    def accept(self, token):
        pass

    def __call__(self, scores):
        return scores[None]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    ("processor", "error", "message"),
    [
        (average, ValueError, r"average returned scores of the shape \[8\], not \[{rows}, 8\] as given"),
        (lambda ids, scores: scores.repeat(2, 1), ValueError, r"lambda> .* \[{twice}, 8\], not \[{rows}, 8\]"),
        (Silent(), TypeError, "Silent returned a NoneType, not a tensor of scores"),
        (Stuck(), ValueError, r"Stuck returned scores of the shape \[1, 8\], not \[8\] as given"),
    ],
)
def test_scores_of_another_shape_are_refused_by_name(processor, error, message, rows):
    state = PathState([processor])
    with pytest.raises(error, match=message.format(rows=rows, twice=2 * rows)):
        LogitsPipeline([processor], batch_size=rows)(LOGITS, PATHS.__getitem__, lambda row: state)


def namesakes():
    """Returns user classes with the names of transformers' processors, but other behaviour."""

    def ban_last(self, input_ids, scores):
        return scores.scatter(1, input_ids[:, -1:], -torch.inf)

    names = ("TopKLogitsWarper", "TemperatureLogitsWarper", "SynthIDTextWatermarkLogitsProcessor")
    given = {"top_k": 3, "temperature": 1e-300, "filter_value": -torch.inf, "__call__": ban_last}
    return [type(name, (), given)() for name in names]


@pytest.mark.parametrize("processor", namesakes(), ids=lambda processor: type(processor).__name__)
def test_a_class_is_not_taken_for_its_namesake(processor):
    warp = LogitsPipeline([processor])
    assert warp.temperature == 1
    assert not warp.only_divides
    assert not is_static(processor)
    for scores in (warp(LOGITS, PATHS.__getitem__), warp.trimmed(LOGITS, PATHS.__getitem__)[0]):
        assert scores.isinf().nonzero().tolist() == [[row, path[-1]] for row, path in enumerate(PATHS)]


def test_a_criterion_is_not_taken_for_its_namesake():
    def end(self, ids, scores, **kwargs):
        return ids[:, -1] == 5

    given = {"max_length": 2, "eos_token_id": torch.tensor([6]), "__call__": end}
    stopping = Stopping([type(name, (), given)() for name in ("MaxLengthCriteria", "EosTokenCriteria")])
    assert stopping.max_length == sys.maxsize
    assert [stopping(token, lambda token=token: [1, token]) for token in (5, 6)] == [True, False]


def test_extreme_temperatures():
    assert LogitsPipeline([TemperatureLogitsWarper(1e-11), TopKLogitsWarper(3)]).temperature == 0
    frozen = LogitsPipeline([TemperatureLogitsWarper(1e-300)])
    assert torch.equal(frozen(LOGITS, PATHS.__getitem__), LOGITS)
    assert LogitsPipeline([TemperatureLogitsWarper(1e-9)]).temperature == 1e-9
    assert LogitsPipeline([TemperatureLogitsWarper(0.5)], greedy=True).temperature == 0
    with pytest.raises(ValueError, match="temperature must be at most 1e6, got 1e"):
        LogitsPipeline([TemperatureLogitsWarper(1e308)])

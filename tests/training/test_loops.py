"""Loops in texts: their definition, the place of the cut, and the early end of decoding."""

import random

import pytest
import torch
from support.models import PROMPTS, greedy_reference, tiny

from arbordraft import RaggedModel
from arbordraft.training.completion import Completion, DecoderCompleter, Sampling
from arbordraft.training.loops import LoopCriteria, before_loop, loop_start

TEXT = list(range(100, 160))


@pytest.mark.parametrize(
    ("tokens", "kept"),
    [
        ([], 0),
        (TEXT, 60),
        (TEXT + [7] * 22, 82),  # 21 tokens repeat, fewer than nine in ten of 24
        (TEXT + [7] * 23, 61),
        (TEXT + [7] * 90, 61),
        (TEXT + TEXT[:40] * 2, 100),
        (TEXT + TEXT[:41] * 4, 60 + 41 * 4),  # rounds of 41 tokens are too long
        ([1, 2, 3] * 20, 3),
        (TEXT[:23] * 2, 46),
        (TEXT[:24] * 2, 24),
        (TEXT[:40] * 2 + TEXT, 40),  # the text after the loop is cut off, too
    ],
)
def test_a_text_is_kept_up_to_the_second_round_of_a_loop(tokens, kept):
    assert before_loop(tokens) == tokens[:kept]


def listed(length: int, count: int) -> list[int]:
    """Builds a list whose items differ only in their number."""
    return [token for item in range(count) for token in [900 + item, *TEXT[: length - 1]]]


@pytest.mark.parametrize(("length", "kept"), [(5, None), (12, 12), (20, 20)])
def test_counting_numbers_of_a_list_do_not_hide_a_loop(length, kept):
    """One token in ten may differ."""
    tokens = listed(length, 6)
    found = len(before_loop(tokens))
    assert found == len(tokens) if kept is None else kept <= found <= kept + 3


@pytest.mark.parametrize("words", [3, 50, 5000])
def test_random_texts_are_no_loops(words):
    source = random.Random(words)
    for _ in range(20):
        text = [source.randrange(words) for _ in range(128)]
        assert before_loop(text) == text


def test_the_criterion_judges_the_end_of_every_row():
    rows = torch.tensor([TEXT + [7] * 60, TEXT + TEXT, [7] * 60 + TEXT, (TEXT[:40] * 3)])
    assert LoopCriteria()(rows, None).tolist() == [True, False, False, True]


@pytest.mark.parametrize("between", [5, 12])
def test_an_answer_may_repeat_its_prompt(between):
    """The template's tokens in between tell a repeated prompt of any length from a loop."""
    for length in range(1, 50):
        prompt = [*TEXT[:length], *range(1, 1 + between)]
        assert all(loop_start(prompt + TEXT[:end]) is None for end in range(length + 1))


def test_a_text_without_a_loop_is_unchanged():
    whole = Completion(TEXT, True, torch.zeros(70, 2))
    assert whole.without_loop() is whole


@pytest.mark.parametrize("hidden", [False, True])
def test_the_target_stops_at_a_loop_and_keeps_the_text_before_it(monkeypatch, hidden):
    model = tiny(max_position_embeddings=512)
    whole = greedy_reference(model, PROMPTS, max_new_tokens=300)
    assert all(len(tokens) == 300 for tokens in whole)
    target = RaggedModel(model, kernels="torch")
    rows = []
    run = target.run
    monkeypatch.setattr(
        target, "run", lambda tokens, *rest, **named: rows.append(len(tokens)) or run(tokens, *rest, **named)
    )
    complete = DecoderCompleter(target, hidden_layers=(1,) if hidden else ())
    found = complete(PROMPTS, Sampling(0.0, 300), 0, lambda _: None)
    for prompt, tokens, done in zip(PROMPTS, whole, found, strict=True):
        kept = before_loop(tokens)
        assert 0 < len(kept) < 200
        assert (done.tokens, done.ended) == (kept, False)
        assert done.hidden is None if not hidden else len(done.hidden) == len(prompt) + len(kept) - 1
    assert sum(rows) < sum(len(done.tokens) + 50 for done in found) + sum(map(len, PROMPTS))

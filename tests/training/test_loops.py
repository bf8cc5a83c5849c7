"""Loops: what counts as one, where it is cut off, and that nothing is decoded behind it."""

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
        (TEXT + [7] * 22, 82),  # 21 come again: less than nine in ten of 24
        (TEXT + [7] * 23, 61),
        (TEXT + [7] * 90, 61),
        (TEXT + TEXT[:40] * 2, 100),
        (TEXT + TEXT[:41] * 4, 60 + 41 * 4),  # rounds too long
        ([1, 2, 3] * 20, 3),
        (TEXT[:23] * 2, 46),
        (TEXT[:24] * 2, 24),
        (TEXT[:40] * 2 + TEXT, 40),  # what comes behind the loop goes, too
    ],
)
def test_a_text_is_kept_up_to_the_second_round(tokens, kept):
    assert before_loop(tokens) == tokens[:kept]


def listed(length: int, count: int) -> list[int]:
    """A list whose items differ in nothing but their number."""
    return [token for item in range(count) for token in [900 + item, *TEXT[: length - 1]]]


@pytest.mark.parametrize(("length", "kept"), [(5, None), (12, 12), (20, 20)])
def test_numbers_of_a_list_may_count_on(length, kept):
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


def test_a_criterion_says_it_of_every_row_and_looks_at_the_end_alone():
    rows = torch.tensor([TEXT + [7] * 60, TEXT + TEXT, [7] * 60 + TEXT, (TEXT[:40] * 3)])
    assert LoopCriteria()(rows, None).tolist() == [True, False, False, True]


@pytest.mark.parametrize("between", [5, 12])
def test_an_answer_may_repeat_its_prompt(between):
    """What a template puts in between tells it from a loop, whatever the prompt's length."""
    for length in range(1, 50):
        prompt = [*TEXT[:length], *range(1, 1 + between)]
        assert all(loop_start(prompt + TEXT[:end]) is None for end in range(length + 1))


def test_no_loop_is_no_change():
    whole = Completion(TEXT, True, torch.zeros(70, 2))
    assert whole.without_loop() is whole


@pytest.mark.parametrize("hidden", [False, True])
def test_the_target_stops_when_it_loops_and_what_was_before_is_kept(monkeypatch, hidden):
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

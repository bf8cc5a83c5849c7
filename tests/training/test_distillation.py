"""Self-distillation: roles of tokens, conversations left out, and runs that resume to the same bytes."""

import random
import time
from collections import Counter
from dataclasses import replace
from itertools import count, pairwise
from string import ascii_lowercase

import pytest
import torch
from support.chats import BRACKETS, CHATML, END, START, Babble, Scripted, chat_tokenizer
from support.models import EOS, RaggedModel, tiny

from arbordraft.training import user_turns
from arbordraft.training.chat import ChatFormat
from arbordraft.training.completion import Completion, DecoderCompleter
from arbordraft.training.distillation import Recipe, SelfDistillation
from arbordraft.training.features import FreshFeatures
from arbordraft.training.prompt_templates import PromptTemplate, draw_prompt_template, known_words
from arbordraft.training.shards import ANSWER, GIVEN, PROMPT, ShardError, ShardFolder

ONE = Recipe(conversations=1, temperatures=(0.7,), answers=1, max_new_tokens=20, max_tokens=400)
SMALL = Recipe(conversations=10, per_shard=4, max_new_tokens=30, max_tokens=500, follow_ups=0.5)


def asking(*texts: str, system: str | None = None) -> list[dict[str, str]]:
    said = [] if system is None else [{"role": "system", "content": system}]
    return said + [{"role": "user", "content": text} for text in texts]


def answering(tokenizer, *texts: str) -> Scripted:
    """Builds a completer that answers with these texts, one after the other."""
    chat, left = ChatFormat(tokenizer), list(texts)
    return Scripted(lambda *_: chat.ids_after(left.pop(0)))


def conversations(folder: ShardFolder) -> list[tuple[list[int], list[int], float]]:
    found = []
    for shard in folder.shards():
        ends = shard.offsets.tolist()
        for (begin, end), temperature in zip(pairwise(ends), shard.temperatures, strict=True):
            found.append((shard.tokens[begin:end].tolist(), shard.roles[begin:end].tolist(), float(temperature)))
    return found


def spans(roles: list[int]) -> list[int]:
    """Returns the roles in order, each once per span."""
    return [role for place, role in enumerate(roles) if place == 0 or roles[place - 1] != role]


def _spans_of(roles: list[int], wanted: int) -> list[tuple[int, int]]:
    edges = [place for place in range(len(roles) + 1) if place in (0, len(roles)) or roles[place] != roles[place - 1]]
    return [(begin, end) for begin, end in pairwise(edges) if roles[begin] == wanted]


# -- given conversations


@pytest.mark.parametrize("system", [None, "be brief"])
@pytest.mark.parametrize("spaced", [False, True])
@pytest.mark.parametrize(("template", "tail"), [(CHATML, END), (BRACKETS, f" {END}")])
def test_tokens_and_answers_are_those_of_transformers(tmp_path, template, tail, spaced, system):
    if system and template == BRACKETS:
        system = None
    tokenizer = chat_tokenizer(template, spaced=spaced)
    answers = ["nobody", "you", "x 1"]
    messages = asking("who are you", "and i", "and he", system=system)
    complete = answering(tokenizer, *(answer + tail for answer in answers))
    SelfDistillation(ChatFormat(tokenizer), complete, ONE, ShardFolder(tmp_path), messages=[messages]).run()

    whole = messages[:-3]
    for asked, answer in zip(messages[-3:], answers, strict=True):
        whole += [asked, {"role": "assistant", "content": answer}]
    expected = tokenizer.apply_chat_template(whole, return_assistant_tokens_mask=True, return_dict=True)
    ((tokens, roles, temperature),) = conversations(ShardFolder(tmp_path))
    assert tokens == expected["input_ids"][: len(tokens)]
    assert tokenizer.decode(expected["input_ids"][len(tokens) :]).strip() == ""  # template text after the last end
    assert [role == ANSWER for role in roles] == [bool(mark) for mark in expected["assistant_masks"]][: len(roles)]
    assert temperature == pytest.approx(0.7)
    assert [len(prompt) for prompt, _ in complete.asked] == [place for place, _ in _spans_of(roles, ANSWER)]


def test_every_prompt_in_every_shard_is_answered_once_per_turn(tmp_path):
    texts = [f"question {number}" for number in range(10)]
    chat = ChatFormat(chat_tokenizer())
    SelfDistillation(chat, Babble(), SMALL, ShardFolder(tmp_path), messages=list(map(asking, texts))).run()
    found = [
        (chat.text(tokens).split("user\n")[1].split(END)[0], round(temperature, 3))
        for tokens, _, temperature in conversations(ShardFolder(tmp_path))
    ]
    assert found == [(text, t) for number, text in enumerate(texts) for t in SMALL.of_prompt(number % 4)]


@pytest.mark.parametrize(
    "answer",
    [
        Completion([8, 9, 3], False),  # cut off; token 3, a newline, also occurs in the template's next text
        Completion([8, 9, 1, 5], True),  # ended with another stop token than the template's
    ],
)
def test_a_conversation_is_over_when_an_answer_does_not_end_as_in_the_template(tmp_path, answer):
    complete = Scripted(lambda *_: answer)
    chat = ChatFormat(chat_tokenizer())
    SelfDistillation(chat, complete, ONE, ShardFolder(tmp_path), messages=[asking("why is it so", "really")]).run()
    ((tokens, roles, _),) = conversations(ShardFolder(tmp_path))
    assert tokens[-len(answer.tokens) :] == answer.tokens
    assert spans(roles) == [GIVEN, ANSWER]


def test_an_answer_may_be_nothing_but_its_end(tmp_path):
    complete = Scripted(lambda *_: [EOS])
    chat = ChatFormat(chat_tokenizer())
    SelfDistillation(chat, complete, ONE, ShardFolder(tmp_path), messages=[asking("why", "really")]).run()
    ((tokens, roles, _),) = conversations(ShardFolder(tmp_path))
    assert [tokens[begin:end] for begin, end in _spans_of(roles, ANSWER)] == [[EOS], [EOS]]
    assert chat.text(tokens).count(END) == 5  # after the system message, two user turns and two answers


def test_prompts_without_room_for_an_answer_are_left_out(tmp_path):
    tokenizer = chat_tokenizer()
    recipe = replace(ONE, conversations=2, max_tokens=100)
    chats = [asking("a" * 60), asking("b", "c" * 60)]
    complete = answering(tokenizer, f"d{END}")
    SelfDistillation(ChatFormat(tokenizer), complete, recipe, ShardFolder(tmp_path), messages=chats).run()
    ((tokens, roles, _),) = conversations(ShardFolder(tmp_path))
    assert tokenizer.decode(tokens).endswith(f"{START}user\nb{END}\n{START}assistant\nd{END}")
    assert spans(roles) == [GIVEN, ANSWER]  # the second turn has no answer and is left out

    recipe = replace(recipe, per_shard=1)
    work = SelfDistillation(ChatFormat(tokenizer), complete, recipe, ShardFolder(tmp_path / "a"), messages=chats)
    with pytest.raises(ShardError, match=r"tokens-00000.safetensors would be empty.*raise max_tokens or per_shard"):
        work.run()


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "wants 1 conversations, but only 0 were given; lower recipe.conversations"),
        ([[{"role": "system", "content": "be brief"}]], "has no user turn"),
    ],
)
def test_missing_conversations_or_user_turns_are_errors(tmp_path, messages, problem):
    with pytest.raises(ValueError, match=problem):
        SelfDistillation(ChatFormat(chat_tokenizer()), Babble(), ONE, ShardFolder(tmp_path), messages=messages).run()


# -- conversations that the target writes


@pytest.mark.parametrize("spaced", [False, True])
def test_openings_are_tokenised_together_with_the_template(tmp_path, spaced):
    tokenizer = chat_tokenizer(BRACKETS, spaced=spaced)
    complete = Babble()
    asked = []

    def listen(prompts, *rest):
        asked.extend(map(tuple, prompts))
        return complete(prompts, *rest)

    recipe = replace(SMALL, conversations=30, per_shard=30, follow_ups=0.0)
    SelfDistillation(ChatFormat(tokenizer), listen, recipe, ShardFolder(tmp_path)).run()
    source = random.Random("0 0")
    drawn = [draw_prompt_template(source, known_words(tokenizer)) for _ in range(30)]
    assert 0 < sum(bool(template.around) for template in drawn) < 30
    texts = [f"{START}Q: {template.text}" + (" A:" if template.around else "") for template in drawn]
    expected = [tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    assert Counter(asked[:30]) == Counter(expected)


def test_the_targets_own_words_are_marked_in_all_turns(tmp_path):
    tokenizer = chat_tokenizer()
    chat = ChatFormat(tokenizer)
    recipe = replace(SMALL, conversations=40, per_shard=40, follow_ups=1.0)
    SelfDistillation(chat, Babble(), recipe, ShardFolder(tmp_path)).run()
    found = conversations(ShardFolder(tmp_path))
    assert {round(temperature, 3) for *_, temperature in found} == {0.0, 0.7, 1.0}
    longest = max(found, key=lambda conversation: len(spans(conversation[1])))
    assert spans(longest[1]) == [GIVEN, PROMPT, GIVEN, ANSWER, GIVEN, PROMPT, GIVEN, ANSWER]
    for tokens, roles, _ in found:
        assert roles[-1] == ANSWER
        assert len(tokens) <= recipe.max_tokens
        given = [chat.text(tokens[begin:end]) for begin, end in _spans_of(roles, GIVEN)]
        assert given[0].startswith(f"{START}system\nbe kind{END}\n{START}user\n")
        # Only the template's text stands between the target's words, and every turn ends once.
        assert set(given[1:]) <= {chat.to_assistant, chat.to_user.removeprefix(END)}
        for begin, _ in _spans_of(roles, ANSWER):
            assert chat.text(tokens[:begin]).endswith(chat.to_assistant)
        for begin, end in _spans_of(roles, PROMPT):
            assert not chat.special & {*tokens[begin:end]}
        for begin, end in _spans_of(roles, ANSWER):
            assert end - begin <= recipe.max_new_tokens


def test_answers_take_their_temperatures_in_turn():
    recipe = Recipe()
    assert [recipe.of_prompt(number) for number in range(3)] == [[0.0, 0.7], [0.7, 1.0], [0.0, 0.7]]


@pytest.mark.parametrize(
    ("turn", "kept"),
    [
        (Completion([8] * 14 + [EOS], True), 14),  # without its stop token
        (Completion([8] * 14 + [1, 9, EOS], True), 14),  # cut at a special token
        (Completion([8] * 50 + [5] + [9] * 29, False), 51),  # cut off after a sentence
        (Completion([8] * 20 + [5] + [9] * 59, False), 80),  # not cut where too little would remain
        (Completion([8] * 14 + [60], True), 14),  # with a stop token that is not special
    ],
)
def test_user_turns_are_cut_at_special_tokens_and_sentences(tmp_path, monkeypatch, turn, kept):
    templates = iter(f"{letter} " for letter in ascii_lowercase)
    monkeypatch.setattr(user_turns, "draw_prompt_template", lambda *_: PromptTemplate("free", next(templates)))
    recipe = replace(SMALL, per_shard=10, follow_ups=0.0, answers=1)
    complete = Scripted(lambda _, sampling: [8, EOS] if sampling.max_new_tokens == recipe.max_new_tokens else turn)
    SelfDistillation(ChatFormat(chat_tokenizer()), complete, recipe, ShardFolder(tmp_path)).run()
    found = conversations(ShardFolder(tmp_path))
    assert len(found) == 10
    for tokens, roles, _ in found:
        ((begin, end),) = _spans_of(roles, PROMPT)
        assert tokens[begin:end] == turn.tokens[:kept]


@pytest.mark.parametrize(
    ("around", "asks", "user"),
    [
        ("sum up: {text}", 0, "sum up: i see bees."),
        ("{text} who is it?", 0, "i see bees. who is it?"),
        ("{text} q: who", 1, "i see bees. q: who is it"),
    ],
    ids=["instruction first", "question after the text", "question that the target completes"],
)
def test_the_target_writes_the_text_that_a_prompt_is_about(tmp_path, monkeypatch, around, asks, user):
    chat = ChatFormat(chat_tokenizer())
    monkeypatch.setattr(
        user_turns, "draw_prompt_template", lambda *_: PromptTemplate("summary", "tell of bees", 60, around)
    )
    complete = answering(chat.tokenizer, f" i see bees. {END}", *[f" is it{END}"] * asks, f"yes{END}")
    SelfDistillation(chat, complete, replace(ONE, follow_ups=0.0), ShardFolder(tmp_path)).run()
    asked = [(chat.text(tokens), sampling.max_new_tokens) for tokens, sampling in complete.asked]
    assert asked[0] == (f"{chat.before_user()}tell of bees{chat.to_assistant}", 60)
    ((tokens, roles, _),) = conversations(ShardFolder(tmp_path))
    assert chat.text(tokens) == f"{chat.before_user()}{user}{chat.to_assistant}yes{END}"
    own = [chat.text(tokens[begin:end]) for begin, end in _spans_of(roles, PROMPT)]
    assert own == [" is it"] * asks  # the text was written in another context, so it is not learned here


def test_useless_user_turns_are_left_out(tmp_path, monkeypatch):
    tokenizer = chat_tokenizer()
    monkeypatch.setattr(user_turns, "draw_prompt_template", lambda *_: PromptTemplate("free", ""))
    chat = ChatFormat(tokenizer)
    turns = ["short", "ab " * 31, "i see a lighthouse", "I see a light-house.", "how do bees find home"]

    def rule(prompt, sampling):
        if sampling.max_new_tokens == 80 and chat.text(prompt).count("assistant") == 0:
            return [*chat.ids(turns.pop(0)), EOS]
        return [10, EOS]  # follow-ups are too short

    recipe = Recipe(conversations=5, temperatures=(0.0,), answers=1, max_new_tokens=30, max_tokens=500, follow_ups=1.0)
    SelfDistillation(chat, Scripted(rule), recipe, ShardFolder(tmp_path)).run()
    found = [chat.text(tokens[begin:end]) for tokens, roles, _ in conversations(ShardFolder(tmp_path))
             for begin, end in _spans_of(roles, PROMPT)]  # fmt: skip
    assert found == ["i see a lighthouse", "how do bees find home"]


@pytest.mark.parametrize(("max_tokens", "answers"), [(196, 1), (197, 2)])
def test_follow_ups_are_only_begun_where_they_can_be_answered(tmp_path, monkeypatch, max_tokens, answers):
    monkeypatch.setattr(user_turns, "draw_prompt_template", lambda *_: PromptTemplate("free", ""))
    chat = ChatFormat(chat_tokenizer())
    complete = Scripted(lambda *_: [*range(8, 23), EOS])
    recipe = replace(ONE, max_tokens=max_tokens, max_new_tokens=30, follow_ups=1.0)
    SelfDistillation(chat, complete, recipe, ShardFolder(tmp_path)).run()
    # 197 tokens: template 23, user 15, template 13, answer 16, template 7, user up to 80, template 13, answer up to 30.
    assert max(len(prompt) + sampling.max_new_tokens for prompt, sampling in complete.asked) <= max_tokens
    ((_, roles, _),) = conversations(ShardFolder(tmp_path))
    assert len(_spans_of(roles, ANSWER)) == answers


def test_a_template_without_text_before_user_turns_needs_given_conversations(tmp_path):
    plain = "{% for message in messages %}{{ message['content'] + '<|end|>' }}{% endfor %}"
    chat = ChatFormat(chat_tokenizer(plain))
    with pytest.raises(ValueError, match="puts nothing before user turns"):
        SelfDistillation(chat, Babble(), ONE, ShardFolder(tmp_path))
    SelfDistillation(chat, Babble(), ONE, ShardFolder(tmp_path), messages=[asking("why")]).run()


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"conversations": 0}, "conversations must be positive, got 0"),
        ({"per_shard": 0}, "per_shard must be positive"),
        ({"temperatures": ()}, "temperatures must not be empty"),
        ({"temperatures": (-1.0,)}, "temperatures must not be empty or negative"),
        ({"follow_ups": 1.5}, r"follow_ups must lie in \[0, 1\]"),
        ({"max_tokens": 128}, r"max_tokens \(128\) must exceed max_new_tokens \(128\)"),
        ({"temperatures": (0.0,)}, "repeat a greedy one"),
        ({"temperatures": (0.0, 0.0, 1.0)}, "repeat a greedy one"),
        ({"answers": 5}, "repeat a greedy one"),
    ],
)
def test_bad_recipes_are_errors(wrong, problem):
    with pytest.raises(ValueError, match=problem):
        Recipe(**wrong)


# -- interruptions, parts and settings


def run(folder, complete, recipe=SMALL, messages=None, provenance=None, **kwargs: int) -> list[tuple[int, int, int]]:
    told: list[tuple[int, int, int]] = []
    chat = ChatFormat(chat_tokenizer())
    work = SelfDistillation(chat, complete, recipe, ShardFolder(folder), provenance or {}, messages)
    work.run(lambda *news: told.append(news), **kwargs)
    return told


def contents(folder) -> dict[str, bytes]:
    """Returns the bytes of all files but those of the minutes."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if not path.name.startswith("minutes-")}


@pytest.fixture
def whole(tmp_path) -> dict[str, bytes]:
    """Returns the files of an uninterrupted run."""
    torch.manual_seed(1)  # the global seed must not matter
    told = run(tmp_path / "whole", Babble())
    assert [(done, shards) for done, shards, tokens in told if tokens == 0] == [(1, 3), (2, 3), (3, 3)]
    found = contents(tmp_path / "whole")
    assert len(found) == 4
    assert sum(tokens for *_, tokens in told) >= sum(
        roles.count(ANSWER) for _, roles, _ in conversations(ShardFolder(tmp_path / "whole"))
    )
    return found


@pytest.mark.parametrize("calls", [0, 3])
def test_an_interrupted_run_goes_on_to_the_same_bytes(tmp_path, whole, calls):
    fails = iter([False] * calls + [True])
    first = ShardFolder(tmp_path / "again").path(0)
    with pytest.raises(ConnectionError, match="gone"):
        run(tmp_path / "again", Babble(lambda: first.exists() and next(fails)))
    left = contents(tmp_path / "again")
    assert [*left] == ["manifest.json", first.name]
    assert all(whole[name] == found for name, found in left.items())
    run(tmp_path / "again", Babble())
    assert contents(tmp_path / "again") == whole


def test_finished_shards_are_not_made_again(tmp_path, whole):
    told = run(tmp_path / "whole", Babble(lambda: True))
    assert told == [(1, 3, 0), (2, 3, 0), (3, 3, 0)]
    (tmp_path / "whole" / "tokens-00001.safetensors").unlink()
    run(tmp_path / "whole", Babble())
    assert contents(tmp_path / "whole") == whole


def test_a_folder_grows_to_the_same_bytes(tmp_path, whole):
    run(tmp_path / "grown", Babble(), replace(SMALL, conversations=4))
    assert len(contents(tmp_path / "grown")) == 2
    run(tmp_path / "grown", Babble(), replace(SMALL, conversations=10))
    assert contents(tmp_path / "grown") == whole


def test_the_time_limit_counts_all_runs(tmp_path, monkeypatch, whole):
    """A shard takes one minute on this clock."""
    minutes = count(0, 30)  # read at the beginning and at the end of a shard
    monkeypatch.setattr(time, "monotonic", lambda: next(minutes) * 2.0)
    given = [(0.5, 1), (1.0, 1), (1.5, 2), (2.0, 2), (9.0, 3)]
    for limit, shards in given:
        told: list[tuple[int, ...]] = []
        SelfDistillation(ChatFormat(chat_tokenizer()), Babble(), SMALL, ShardFolder(tmp_path / "timed")).run(
            lambda *news, told=told: told.append(news), minutes=limit
        )
        assert len(contents(tmp_path / "timed")) == 1 + shards
        assert told[-1][0] == shards
    assert contents(tmp_path / "timed") == whole


def test_parts_make_the_same_bytes_as_one_process(tmp_path, whole):
    for part in (1, 0):
        run(tmp_path / "parts", Babble(), part=part, of=2)
    assert contents(tmp_path / "parts") == whole
    with pytest.raises(ValueError, match=r"parts are numbered 0..1, got 2"):
        run(tmp_path / "parts", Babble(), part=2, of=2)


def test_other_seeds_make_other_conversations(tmp_path, whole):
    run(tmp_path / "other", Babble(), replace(SMALL, seed=1))
    other = contents(tmp_path / "other")
    assert not {*other.values()} & {*whole.values()}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"recipe": replace(SMALL, seed=1)}, r"another recipe.seed: 0 instead of 1"),
        ({"recipe": replace(SMALL, max_new_tokens=31)}, r"another recipe.max_new_tokens: 30 instead of 31"),
        ({"provenance": {"target": "x"}}, "another target: None instead of 'x'"),
    ],
)
def test_other_settings_do_not_resume(tmp_path, whole, changes, problem):
    with pytest.raises(ShardError, match=problem):
        run(tmp_path / "whole", Babble(), **changes)
    assert contents(tmp_path / "whole") == whole


def test_other_conversations_do_not_resume(tmp_path):
    run(tmp_path, Babble(), messages=[asking("why")] * 10)
    run(tmp_path, Babble(), messages=[asking("why")] * 10)
    with pytest.raises(ShardError, match="another messages"):
        run(tmp_path, Babble(), messages=[asking("why not")] * 10)


# -- with a target


def test_hidden_states_of_a_shard_are_stored_before_its_tokens(tmp_path):
    model = tiny(max_position_embeddings=2048)
    target = RaggedModel(model, self_test=False, kernels="torch")
    fresh = FreshFeatures(target, (0, 1))
    stored = []

    def store(shard, states):
        assert not shard.path.exists()
        ends = shard.offsets.tolist()
        sequences = [shard.tokens[begin:end].tolist() for begin, end in pairwise(ends)]
        for expected, found in zip(fresh(sequences), states, strict=True):
            wanted = torch.cat([expected.inputs, expected.final], dim=-1)
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        stored.append(len(shard))

    recipe = replace(SMALL, conversations=8, max_new_tokens=100, max_tokens=700, follow_ups=1.0)
    complete = DecoderCompleter(target, 5, (0, 1, target.num_layers))
    chat = ChatFormat(chat_tokenizer())
    SelfDistillation(chat, complete, recipe, ShardFolder(tmp_path), store=store).run()
    found = conversations(ShardFolder(tmp_path))
    assert sum(stored) == len(found) > 8
    assert max(spans(roles).count(ANSWER) for _, roles, _ in found) == 2

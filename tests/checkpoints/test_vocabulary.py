"""Drafters and targets whose token ids differ: other tokenizers are refused, other padding changes no law."""

import shutil

import pytest
import torch
from support.models import (
    LETTERS,
    PROMPTS,
    check_greedy,
    context,
    grown,
    joined,
    next_logits,
    ragged,
    tiny,
    tiny_checkpoint,
    tiny_tokenizer,
)
from support.request_law import BUSH, FEW, PAIR, fit, small_decoder
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import arbordraft as ad
from arbordraft import builders
from arbordraft.checkpoints.vocabulary import tokenizer_hashes
from arbordraft.decoding.target_initialised import TargetInitialisedDecoder
from arbordraft.drafter_names import drafter_named, load_drafter
from arbordraft.exports.decoder_config import describe
from arbordraft.exports.engines import export_vllm
from arbordraft.exports.onnx import plans
from arbordraft.exports.onnx.sources import of
from arbordraft.exports.onnx.writing import write
from arbordraft.training.students import LanguageModelStudent

PAIRS = [("a", "b"), ("b", "c"), ("ab", "c")]


def merging(pairs=tuple(PAIRS)):
    """Builds a tokenizer with these merges; its tokens have the same ids in every case."""
    tokens = [*"abcdefgh", *sorted({a + b for a, b in PAIRS})]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocabulary, list(pairs))))


def with_tokens(*tokens, special=False):
    tokenizer = tiny_tokenizer(LETTERS[:50])
    tokenizer.add_tokens(list(tokens), special_tokens=special)
    return tokenizer


def templated():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.pad_token = "c"
    return tokenizer


SWAPPED = LETTERS[1] + LETTERS[0] + LETTERS[2:]
OTHERS = {  # tokenizers of equal size
    "two swapped": (tiny_tokenizer, lambda: tiny_tokenizer(SWAPPED), r"'a' is 1 there and 0 here"),
    "reversed": (tiny_tokenizer, lambda: tiny_tokenizer(LETTERS[::-1]), r"'.' is \d+ there and \d+ here"),
    "one replaced": (
        tiny_tokenizer,
        lambda: tiny_tokenizer(LETTERS[:-1] + "!"),
        r"'.' is (\d+|no token) there and (\d+|no token) here",
    ),
    "merges in another order": (merging, lambda: merging(PAIRS[::-1]), "they merge other pairs"),
    "another merge": (merging, lambda: merging([("a", "b"), ("b", "c"), ("a", "bc")]), "they merge other pairs"),
    "another added token": (lambda: with_tokens("<x>"), lambda: with_tokens("<y>"), r"'<[xy]>' is"),
    "another special token": (
        lambda: with_tokens("<x>", special=True),
        lambda: with_tokens("<y>", special=True),
        r"'<[xy]>' is",
    ),
    "added in another order": (lambda: with_tokens("<x>", "<y>"), lambda: with_tokens("<y>", "<x>"), "'<[xy]>' is"),
    "one token more": (tiny_tokenizer, lambda: tiny_tokenizer(LETTERS[:-1]), "'8' is no token there and 60 here"),
}


@pytest.mark.parametrize("how", OTHERS)
def test_another_tokenizer_of_equal_size_is_refused(how, tmp_path):
    """Covers draft models in a folder and in memory."""
    make, other, message = OTHERS[how]
    target = ad.RaggedModel(tiny(), make(), kernels="torch")
    with pytest.raises(
        ValueError, match=rf"other ids to some tokens than the target's: .* differ \(.*{message}.*same_to"
    ):
        ad.LanguageModelDrafter(ad.RaggedModel(tiny(seed=3), other(), kernels="torch")).check(target, ad.IID(1))
    tiny(seed=3).save_pretrained(tmp_path)
    other().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"{tmp_path} and .*differ \(({message})"):
        ad.LanguageModelDrafter.from_pretrained(tmp_path, target)
    between = drafter_named(str(tmp_path), target)  # a drafter loaded by name drafts from the shared tokens
    assert isinstance(between, ad.IntersectionDrafter)
    assert between.shared > 1
    trusted = ad.LanguageModelDrafter.from_pretrained(tmp_path, target, same_tokenizer=True)
    trusted.check(target, ad.IID(1))


def saved(make, folder):
    make().save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (tiny_tokenizer, templated),
        (merging, merging),
        (lambda: with_tokens("<x>"), lambda: with_tokens("<x>", special=True)),
    ],
    ids=["another template and padding", "merges", "special or not"],
)
def test_the_same_tokenizer_is_accepted(tmp_path, ours, theirs):
    target = ad.RaggedModel(tiny(), ours(), kernels="torch")
    ad.LanguageModelDrafter(ad.RaggedModel(tiny(seed=3), theirs(), kernels="torch")).check(target, ad.IID(1))
    tiny(seed=3).save_pretrained(tmp_path / "model")
    theirs().save_pretrained(tmp_path / "model")
    drafter_named(str(tmp_path / "model"), target).check(target, ad.IID(1))
    assert tokenizer_hashes(saved(ours, tmp_path / "again")) == tokenizer_hashes(ours())


def test_without_tokenizers_sizes_must_agree(tmp_path):
    tiny(seed=3, vocab_size=64).save_pretrained(tmp_path)
    for target in (ragged(), ad.RaggedModel(tiny(), tiny_tokenizer(), kernels="torch")):
        drafter = ad.LanguageModelDrafter.from_pretrained(tmp_path, target)
        with pytest.raises(
            ValueError, match=r"has 64 token ids, the target 61.*wrap both .* or pass same_tokenizer=True"
        ):
            drafter.check(target, ad.IID(1))
        ad.LanguageModelDrafter.from_pretrained(tmp_path, target, same_tokenizer=True).check(target, ad.IID(1))
    equal = ad.LanguageModelDrafter(tiny(seed=3))
    equal.check(ad.RaggedModel(tiny(), tiny_tokenizer(), kernels="torch"), ad.IID(1))  # its tokenizer is unknown


# Padding

GREEDY = ad.Coupling.matching(2)
TREE = ad.TreeTopology.from_k_config((2, 2, 1))
SIZES = {"drafter padded": (61, 64), "target padded": (64, 61), "drafter smaller": (61, 31), "both padded": (62, 80)}


def pair(sizes):
    """Builds a target and a draft model of these sizes, which share a tokenizer of the smaller size."""
    letters = LETTERS[: min(sizes)]
    first = ad.RaggedModel(tiny(vocab_size=sizes[0]), tiny_tokenizer(letters), kernels="torch")
    return first, ad.RaggedModel(tiny(seed=3, vocab_size=sizes[1]), tiny_tokenizer(letters), kernels="torch")


BUILT = {
    "trees": lambda first, draft: ad.SpeculativeDecoder(first, ad.LanguageModelDrafter(draft), TREE, GREEDY),
    "with lookups": lambda first, draft: ad.SpeculativeDecoder(
        first, ad.HybridDrafter(ad.NGramDrafter(3, 1), ad.LanguageModelDrafter(draft)), TREE, GREEDY
    ),
    "specinfer": lambda first, draft: builders.specinfer(first, draft, (2, 1)),
    "target-initialised": lambda first, draft: builders.dynasd(first, ad.LanguageModelDrafter(draft), depth=3),
    "spechub": lambda first, draft: builders.spechub(first, draft, depth=2),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("built", BUILT)
@pytest.mark.parametrize("sizes", SIZES)
def test_padding_changes_no_greedy_token(sizes, built):
    """Random models emit the ids of their padding, too; the target's tokens must stay unchanged."""
    first, draft = pair(SIZES[sizes])
    assert check_greedy(BUILT[built](first, draft)).drafted > 0


@pytest.mark.filterwarnings("ignore:3 target-initialised candidates")
def test_candidates_that_the_drafter_lacks_are_continued():
    """The target's own first tokens may be ids of its padding, after which the drafter must draft."""
    first, draft = pair((64, 20))
    decoder = TargetInitialisedDecoder(first, ad.LanguageModelDrafter(draft), ad.TreeTopology.from_k_config((3, 1)))
    output = decoder.generate(
        torch.tensor(PROMPTS[:1]), max_new_tokens=20, do_sample=True, seeds=[1], eos_token_id=None
    )
    assert output.shape[1] == len(PROMPTS[0]) + 20
    assert output.max() >= 20


LAWS = {
    "iid": lambda draft: small_decoder(ad.IID(2), ad.TopDown(ad.RecursiveRejection()), BUSH, draft),
    "without replacement, lifted": lambda draft: small_decoder(
        ad.WithoutReplacement(2), ad.Lifted(ad.RecursiveRejection()), BUSH, draft
    ),
    "spechub": lambda draft: small_decoder(ad.TopTail(1, 1), ad.TopDown(ad.SpecHub()), PAIR, draft),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("size", [FEW - 1, FEW + 3], ids=["fewer ids", "more ids"])
def test_padding_changes_no_law(law, size):
    draft = ragged(seed=3, sharpness=1.5, vocab_size=size)
    assert fit(LAWS[law](ad.LanguageModelDrafter(draft, same_tokenizer=True))) > 1e-3


@pytest.mark.parametrize("size", [FEW - 2, FEW + 30], ids=["fewer ids", "more ids"])
def test_children_are_drawn_from_the_reported_rows(size):
    """The row of every node is the softmax over the shared ids: it sums to 1, and no other id is drawn."""
    draft = ragged(seed=3, vocab_size=size)
    drafter = ad.LanguageModelDrafter(draft, same_tokenizer=True)
    text, drawn = [1, 5, 3, FEW - 1], set()
    read = [token if token < size else 0 for token in text]
    shared = min(size, FEW)
    expected = torch.zeros(FEW)
    expected[:shared] = next_logits(draft.model, read)[:shared].softmax(-1)
    for seed in range(60):
        state = joined(drafter, [text])
        tree = grown(drafter, state, context([text], BUSH, ad.IID(2), seed=seed, vocab_size=FEW))
        torch.testing.assert_close(tree.drawn_from(0), expected, atol=1e-5, rtol=0)
        drawn |= set(tree.token[1:].tolist())
    assert drawn <= set(range(shared))
    assert len(drawn) > 2


# Exported graphs


def exported(draft, first, folder):
    return write(lambda: [plans.causal_lm(draft, plans.Origin(first, "tiny"))], folder).folder


def test_graphs_know_their_tokenizer(tmp_path):
    first, draft = pair((61, 64))
    folder = exported(draft, first, tmp_path / "graph")
    check_greedy(ad.SpeculativeDecoder(first, load_drafter(folder, first), TREE, GREEDY), count=8)
    with pytest.raises(
        ValueError, match=r"made for a tokenizer that gives other ids .*export a drafter with the target's"
    ):
        load_drafter(folder, ad.RaggedModel(tiny(), tiny_tokenizer(SWAPPED), kernels="torch"))
    with pytest.raises(ValueError, match="vocabulary of 64 tokens, the target has 61"):
        load_drafter(folder, ragged())  # without a tokenizer, extra ids need not be padding


def test_graphs_are_made_for_one_tokenizer(tmp_path):
    for name, letters in (("draft", SWAPPED), ("target", LETTERS)):
        tiny_checkpoint(tmp_path / name, tiny_tokenizer(letters, eos_token="c"))
    with pytest.raises(ValueError, match="gives other ids to some tokens"):
        of(str(tmp_path / "draft"), str(tmp_path / "target"))
    shutil.rmtree(tmp_path / "draft")
    tiny_checkpoint(tmp_path / "draft", vocab_size=64)
    of(str(tmp_path / "draft"), str(tmp_path / "target"))
    with pytest.raises(ValueError, match="onnxruntime-genai takes no padded vocabulary: the draft has 64 token ids"):
        of(str(tmp_path / "draft"), str(tmp_path / "target"), causal=True)


def test_engines_get_no_draft_model_of_another_tokenizer(tmp_path):
    for name, letters in (("draft", SWAPPED), ("same", LETTERS), ("target", LETTERS)):
        tiny_checkpoint(tmp_path / name, tiny_tokenizer(letters))
    with pytest.raises(ValueError, match=r"draft and .*target differ \('a' is 1 there and 0 here\)"):
        export_vllm(tmp_path / "draft", tmp_path / "out", target=str(tmp_path / "target"))
    export_vllm(tmp_path / "same", tmp_path / "out", target=str(tmp_path / "target"))


def test_trained_draft_models_know_their_tokenizer(tmp_path):
    student = LanguageModelStudent(2)
    student.build(ad.RaggedModel(tiny(), tiny_tokenizer(), kernels="torch"), list)
    student.save(tmp_path)
    drafter_named(str(tmp_path), ad.RaggedModel(tiny(), tiny_tokenizer(), kernels="torch")).check(
        ad.RaggedModel(tiny(), tiny_tokenizer(), kernels="torch"), ad.IID(1)
    )
    swapped = ad.RaggedModel(tiny(), tiny_tokenizer(SWAPPED), kernels="torch")
    assert isinstance(drafter_named(str(tmp_path), swapped), ad.IntersectionDrafter)


def test_a_description_keeps_same_tokenizer():
    draft = ad.LanguageModelDrafter(tiny(seed=3), same_tokenizer=True)
    assert describe(draft) == {"class": "LanguageModelDrafter", "trained": True, "arguments": {"same_tokenizer": True}}
    assert describe(ad.LanguageModelDrafter(tiny(seed=3))) == {"class": "LanguageModelDrafter", "trained": True}

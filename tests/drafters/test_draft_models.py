"""Draft models with weights and heads of fewer bits, and those that lie beside a target."""

from dataclasses import replace

import pytest
import torch
from support.gguf_files import LETTERS, write_gguf
from support.models import decode, fusable, varied

import arbordraft as ad
from arbordraft import drafter_names
from arbordraft.deciders import CostAware
from arbordraft.deciders.costs import CostTable, StepCosts
from arbordraft.decoding.drafting import Drafting
from arbordraft.drafter_names import choose_drafter, draft_models_beside
from arbordraft.drafters import agreement, language_model, network
from arbordraft.drafters.agreement import acceptance_at
from arbordraft.drafters.language_model import shrink
from arbordraft.kernels.decoder_layers import Matrix
from arbordraft.kernels.draft_tree import DraftRun
from arbordraft.kernels.prepacked_linear import pack

pytestmark = pytest.mark.usefixtures("kernels")

CHAIN = ad.TreeTopology.chain(4)


def target(dtype=torch.float32, **options):
    return ad.RaggedModel(varied("llama", **options).to(dtype), kernels="native", self_test=False)


def rate(of, drafter):
    _, stats = decode(ad.SpeculativeDecoder(of, drafter, CHAIN), max_new_tokens=40)
    return sum(stats.accepted.values()) / sum(stats.tried.values())


@pytest.fixture
def large_heads(monkeypatch):
    monkeypatch.setattr(network, "_LARGE_HEAD", 0)


@pytest.mark.parametrize("weights", ["int4", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_heads_rank_the_tokens_of_a_copy_of_four_bits(large_heads, weights, dtype):
    of = target(dtype)
    drafter = ad.LanguageModelDrafter(
        ad.RaggedModel(of.model, kernels="native", weights=weights, self_test=False), same_tokenizer=True
    )
    run = drafter._network.native
    own = drafter.model.network().get_output_embeddings().prepacked[0]
    assert run.weights.exact.weight.data_ptr() == own.data_ptr()
    assert run.weights.head.weight.nbytes < own.nbytes
    noise = torch.randn(of.vocab_size, 64, generator=torch.Generator().manual_seed(0)) * 0.02
    bad = Matrix(*pack(of.model.lm_head.weight.detach().float() + noise, "int4"))
    rates = [rate(of, drafter)]
    for changed in (replace(run.weights, head=bad), replace(run.weights, head=bad, exact=None)):
        drafter._network._native = drafter._network._native[0], DraftRun(changed)
        rates.append(rate(of, drafter))
    assert rates[0] >= rates[1] > rates[2] + 0.02
    assert rates[0] > (0.9 if weights == "int8" else 0.6)


def test_other_heads_are_read_as_they_are(monkeypatch):
    of = target()

    def screens(weights):
        copy = ad.RaggedModel(of.model, kernels="native", weights=weights, self_test=False)
        return ad.LanguageModelDrafter(copy)._network.native.weights.exact is not None

    assert not screens("int8")  # the head is small
    monkeypatch.setattr(network, "_LARGE_HEAD", 0)
    assert screens("int8")
    assert not screens(None)  # kernels do not mix quantised and other weights
    monkeypatch.setattr("arbordraft.drafters.native_models.FEW_BITS", 99)
    assert not screens("int8")


def test_four_bits_are_taken_if_they_promise_more(tmp_path, monkeypatch):
    of = target(num_hidden_layers=3)
    shrink(of.model, [0, 1]).save_pretrained(tmp_path / "small")
    found = {}
    for weights in (None, "int4"):
        made = ad.LanguageModelDrafter.from_pretrained(tmp_path / "small", of, weights=weights)
        found[weights] = made._compared(of)
    assert found["int4"].effort(of) < 0.5 * found[None].effort(of)
    taken = ad.LanguageModelDrafter.fitted(tmp_path / "small", of)
    best = max(found, key=lambda weights: found[weights].gain(of))
    assert (taken.model.weights, taken.acceptance) == (best, found[best].acceptance)
    # If 4 bits never agreed, the model's own weights are taken.
    monkeypatch.setattr(language_model, "agreement", lambda _, model: 0.0 if model.weights else 0.9)
    assert ad.LanguageModelDrafter.fitted(tmp_path / "small", of).model.weights is None
    monkeypatch.setattr(language_model, "agreement", lambda *_: 0.9)
    assert ad.LanguageModelDrafter.fitted(tmp_path / "small", of).model.weights == "int4"


def test_agreement_is_one_with_the_same_model_and_scales_the_other_ranks():
    of = target()
    assert agreement.agreement(of, of) == 1
    assert agreement.agreement(of, target(seed=1)) < 0.5
    rates = acceptance_at(0.75, (0.5, 0.2, 0.1))
    assert rates == pytest.approx((0.75, 0.1, 0.05))


def written(folder):
    """Writes a target and smaller models of similar and other names; returns the target's path."""
    large = fusable(vocab_size=len(LETTERS), num_hidden_layers=6)
    write_gguf(folder / "family-7b-q8.gguf", large, [("", "Q8_0")])
    small = shrink(large, [0, 5])
    write_gguf(folder / "family-1b-q8.gguf", small, [("", "Q8_0")])
    write_gguf(folder / "another.gguf", small, [("", "Q8_0")])
    write_gguf(folder / "family-6b-q8.gguf", shrink(large, range(5)), [("", "Q8_0")])
    (folder / "family-1b-notes.txt").write_text("not a model")
    return folder / "family-7b-q8.gguf"


def loaded(path):
    return ad.load(path, "none", kernels="native", device="cpu", dtype="float32").target


def test_draft_models_beside_have_similar_names_and_fewer_bytes(tmp_path):
    of = loaded(written(tmp_path))
    assert [path.name for path in draft_models_beside(of)] == ["family-1b-q8.gguf"]
    folders = tmp_path / "folders"
    assert draft_models_beside(target()) == []  # it lies nowhere
    for name, layers in (("family-7b", 6), ("family-1b", 1), ("other", 1)):
        fusable(num_hidden_layers=layers).save_pretrained(folders / name)
    (folders / "family-2b").mkdir()
    (folders / "family-2b" / "config.json").write_text("{}")  # holds no weights
    own = ad.load(str(folders / "family-7b"), "none", kernels="torch", device="cpu").target
    assert [path.name for path in draft_models_beside(own)] == ["family-1b"]


def test_auto_drafts_with_a_model_beside_the_target(tmp_path, monkeypatch):
    path = written(tmp_path)
    monkeypatch.setattr(ad.LanguageModelDrafter, "effort", lambda *_: 0.1)
    monkeypatch.setattr(language_model, "agreement", lambda *_: 0.8)
    of = loaded(path)
    drafter, why = choose_drafter(of)
    assert isinstance(drafter, ad.HybridDrafter)
    assert isinstance(drafter.otherwise, ad.LanguageModelDrafter)
    assert why.startswith("lookups, and a draft model: family-1b-q8.gguf agrees in 80%, reads 10%")
    prompts = [[5, 9, 7], [11]]
    expected, _ = decode(ad.builders.plain(of), prompts)
    found, stats = decode(ad.SpeculativeDecoder(of, drafter), prompts)
    assert found == expected
    assert sum(stats.tried.values()) > 0
    monkeypatch.setattr(language_model, "agreement", lambda *_: 0.1)
    drafter, why = choose_drafter(of)
    assert isinstance(drafter, ad.NGramDrafter)
    assert "family-1b-q8.gguf agrees in 10%, reads 10% and would bring" in why


def test_auto_says_why_models_beside_do_not_draft(tmp_path):
    path = written(tmp_path)
    write_gguf(tmp_path / "family-1b-q8.gguf", fusable(vocab_size=27), [("", "Q8_0")], tokens=LETTERS[::-1])
    drafter, why = choose_drafter(loaded(path))
    assert isinstance(drafter, ad.NGramDrafter)
    assert "family-1b-q8.gguf does not draft: " in why
    (tmp_path / "family-1b-q8.gguf").unlink()
    assert "no smaller model of a similar name lies beside it" in choose_drafter(loaded(path))[1]


def test_a_trained_drafter_comes_before_models_beside(tmp_path, monkeypatch):
    of = loaded(written(tmp_path))
    head = type("Head", (), {"gain": lambda self, _: 2.0})()
    monkeypatch.setattr(drafter_names, "trained_for", lambda _: tmp_path)
    monkeypatch.setattr(drafter_names, "load_drafter", lambda *_: head)
    monkeypatch.setattr(drafter_names, "draft_models_beside", lambda _: pytest.fail("searched in vain"))
    assert choose_drafter(of)[0] is head


@pytest.fixture
def watched(monkeypatch):
    """A target, a draft model, and the lengths of the prompts that it reads at once."""
    of = target()
    drafter = ad.LanguageModelDrafter(ad.RaggedModel(of.model, kernels="native", weights="int8", self_test=False))
    drafter.acceptance = (0.9, 0.01)
    read, real = [], ad.LanguageModelDrafter.prefill

    def prefill(self, state, tokens):
        read.append([len(part) for part in tokens.values()])
        real(self, state, tokens)

    monkeypatch.setattr(ad.LanguageModelDrafter, "prefill", prefill)
    return of, drafter, read


@pytest.mark.parametrize("decider", [None, "cost-aware"])
def test_prompts_are_read_at_once_only_where_drafts_promise_to_pay(watched, decider):
    of, drafter, read = watched
    dear = StepCosts(CostTable((1, 4, 8, 64), (1.0, 1.1, 8.0, 99.0)), CostTable((1, 8), (0.1, 0.1)))
    chosen = None if decider is None else CostAware(dear)
    made = ad.SpeculativeDecoder(of, drafter, CHAIN, ad.Coupling.shared(), chosen)
    for prompts in ([[5, 9, 7, 5]], [[5, 9, 7, 5]] * 6):
        expected, _ = decode(ad.builders.plain(of), prompts, max_new_tokens=20)
        found, stats = decode(made, prompts, max_new_tokens=20)
        assert found == expected
        drafts = sum(stats.tried.values()) > 0
        assert drafts == (decider is None or len(prompts) == 1)
    assert read == ([[3], [3] * 6] if decider is None else [[3]])


def test_a_long_prompt_is_not_read_for_a_short_answer(watched):
    of, drafter, read = watched
    price = StepCosts(CostTable((1, 64), (1.0, 1.2)), CostTable((1, 8), (0.1, 0.5)))
    long, short = [5, 9, 7, 5] * 15, [5, 9, 7, 5]
    for prompts, tokens, wanted in (
        ([long], 4, []),
        ([long], 50, [[59]]),
        ([short], 4, [[3]]),
        ([long, short], 4, [[3]]),
    ):
        expected, _ = decode(ad.builders.plain(of), prompts, max_new_tokens=tokens)
        read.clear()
        made = ad.SpeculativeDecoder(of, drafter, CHAIN, ad.Coupling.shared(), CostAware(price))
        found, stats = decode(made, prompts, max_new_tokens=tokens)
        assert found == expected
        assert read == wanted
        assert (sum(stats.tried.values()) > 0) == bool(wanted)


def test_a_prompt_that_is_read_later_leaves_the_same_drafts(monkeypatch):
    of, drafted = target(), []
    drafter = ad.LanguageModelDrafter(ad.RaggedModel(of.model, kernels="native", weights="int4", self_test=False))
    made = ad.SpeculativeDecoder(of, drafter, CHAIN, ad.Coupling.shared())
    for reads in (True, False):
        monkeypatch.setattr(Drafting, "reads", lambda self, state, prompts, reads=reads: prompts if reads else [])
        seen = []
        made.on_step = lambda state, tree, verdict, seen=seen: seen.append(tree.token.tolist())
        decode(made, max_new_tokens=20)
        drafted.append(seen)
    assert drafted[0] == drafted[1]

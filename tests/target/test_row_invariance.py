"""A row has the same bits in every batch: in kernels, in models, and in decoded texts."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.models import fusable, varied
from support.native_checks import (
    KINDS,
    MIXERS,
    OPTIONS,
    SIDE_BY_SIDE,
    TREES,
    Stack,
    check_stack_rows,
    check_tree_rows,
    choices_of_rows,
    differing,
    layers_of,
    linear_rows,
    mixtures_of,
    recurrent_layers,
)
from support.prepacked_models import FUSED, disagreements, plain
from support.ragged_case import Case

from arbordraft import RaggedModel
from arbordraft.kernels.prepacked_linear import ACTIVATIONS, WEIGHTS
from arbordraft.kernels.ragged_tree_attention import ragged_tree_attention
from arbordraft.target.equality import equality_report
from arbordraft.target.states import RecurrentStates
from arbordraft.trees.verdict import Exactness

DTYPES = [torch.float32, torch.bfloat16]
pytestmark = pytest.mark.usefixtures("kernels")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_linears(kind, threads):
    torch.set_num_threads(threads)
    for outputs, inputs in ((16, 16), (33, 19), (80, 64), (176, 130)):
        assert differing(linear_rows(kind, outputs, inputs), 40, choices_of_rows(40, 6)) == 0
    for activation in ACTIVATIONS:
        assert differing(linear_rows(kind, 96, 65, activation), 40, choices_of_rows(40, 3)) == 0


@given(st.data(), st.sampled_from(list(KINDS)))
def test_rows_of_any_linear(data, kind):
    count = data.draw(st.integers(1, 24))
    run = linear_rows(kind, data.draw(st.integers(1, 100)), data.draw(st.integers(1, 50)), count=count)
    choice = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=30))
    assert differing(run, count, [choice]) == 0


def test_linears_round_alike_on_any_number_of_threads():
    for kind in KINDS:
        run, rows = linear_rows(kind, 176, 130), list(range(40))
        found = []
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            found += [run(rows), torch.cat([run([row]) for row in rows])]
        assert all(torch.equal(found[0], other) for other in found[1:])


def test_rows_that_depend_on_others_would_be_seen():
    """Negative control: a sum is split at places that depend on the number of rows, as in blocked products."""
    x, weight = torch.randn(40, 64), torch.randn(64, 48)

    def uneven(rows):
        part = 8 * (1 + len(rows) % 7)
        return x[rows, :part] @ weight[:part] + x[rows, part:] @ weight[part:]

    assert differing(uneven, 40, choices_of_rows(40, 6)) > 0
    off_by_one_bit = linear_rows("float32", 48, 64)
    last = torch.tensor(float("inf"))
    assert (
        differing(
            lambda rows: torch.nextafter(off_by_one_bit(rows), last) if len(rows) == 1 else off_by_one_bit(rows),
            40,
            choices_of_rows(40, 0),
        )
        > 0
    )


@given(st.data(), st.sampled_from(DTYPES), st.sampled_from([{}, {"window": 5}, {"sinks": torch.zeros(4)}]))
def test_rows_of_attention(data, dtype, options):
    """Tests any samples of the batch in any order, and any of their rows."""
    case = Case(TREES["trees"] + TREES["several chunks"], dtype=dtype, size=32)
    together = case.run(ragged_tree_attention, use_native=True, **options)
    samples = data.draw(st.lists(st.integers(0, 5), min_size=1, unique=True))
    some = [
        (sample, data.draw(st.lists(st.integers(0, case.batch.rows[sample] - 1), min_size=1, unique=True)))
        for sample in samples
    ]
    part, rows = case.subset(some)
    torch.set_num_threads(data.draw(st.integers(1, 3)))
    assert torch.equal(part.run(ragged_tree_attention, use_native=True, **options), together[rows])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_node_gets_the_bits_of_plain_decoding(options, dtype, threads):
    torch.set_num_threads(threads)
    for samples in (TREES["several words"], TREES["several chunks"]):
        check_tree_rows(Case(samples, dtype=dtype, size=48), **options)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_layers(kind, threads):
    torch.set_num_threads(threads)
    for layers in (layers_of(kind), layers_of(kind)[len(SIDE_BY_SIDE) :], mixtures_of(kind)):
        check_stack_rows(Stack(layers, KINDS[kind][0]))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int4-bfloat16"])
@pytest.mark.parametrize("mixer", MIXERS)
def test_rows_of_recurrent_layers(mixer, kind, threads):
    torch.set_num_threads(threads)
    check_stack_rows(Stack(recurrent_layers(mixer, kind), KINDS[kind][0]))


@pytest.mark.parametrize("mixer", MIXERS)
def test_recurrent_layers_whose_states_are_not_committed_would_be_seen(monkeypatch, mixer):
    monkeypatch.setattr(RecurrentStates, "_replay", lambda *_: None)
    with pytest.raises(AssertionError):
        check_stack_rows(Stack(recurrent_layers(mixer, "float32"), torch.float32))


@given(st.lists(st.integers(1, 30), min_size=1, max_size=4), st.integers(0, 99), st.sampled_from(list(KINDS)))
def test_rows_of_layers_in_any_batch(lengths, seed, kind):
    for layers in (layers_of(kind), mixtures_of(kind)):
        check_stack_rows(Stack(layers, KINDS[kind][0]), seed, [*lengths, 5, 3][:3])


def test_layers_whose_rows_depend_on_others_would_be_seen():
    class Uneven(Stack):
        def run(self, tokens, batch, cache):
            out = super().run(tokens, batch, cache)
            return torch.nextafter(out, out + 1) if len(tokens) > 8 else out

    with pytest.raises(AssertionError):
        check_stack_rows(Uneven(layers_of("float32")))


def test_all_thread_counts_give_the_same_bits():
    text = [index % 50 for index in range(150)]
    for layers in (layers_of("bfloat16"), mixtures_of("bfloat16")):
        stack, found = Stack(layers, torch.bfloat16), []
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            found += [stack.text([text])[0], stack.text([text], [[140], *([1] for _ in range(10))])[0]]
        assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.soak)])
@pytest.mark.parametrize("architecture", FUSED)
def test_rows_of_models(architecture, threads):
    torch.set_num_threads(threads)
    model = fusable(architecture)
    for dtype, weights in itertools.product(DTYPES, (None, *WEIGHTS)):
        target = RaggedModel(model.to(dtype), kernels="native", weights=weights)
        found = equality_report(target, Exactness.EXACT)
        assert found.equal == found.rows > 0


DECODED = [*itertools.product(["llama", "gemma2", "qwen2_moe"], [None, *WEIGHTS])]
DECODED += [(name, None) for name in ("gpt2", "olmo2", "glm4", "cohere", "cohere2", "starcoder2", "phi")]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("architecture", "weights"), DECODED, ids=str)
def test_speculative_bfloat16_equals_plain_decoding(weights, architecture):
    target = RaggedModel(varied(architecture).to(torch.bfloat16), kernels="native", weights=weights)
    assert target.row_invariant
    assert list(disagreements(target)) == []


def test_rounding_that_depends_on_the_batch_would_be_seen():
    """Negative control: PyTorch's own products in bfloat16."""
    found = (pair for seed in range(4) for pair in disagreements(plain(fusable(seed=seed).to(torch.bfloat16))))
    assert list(itertools.islice(found, 1)) != []

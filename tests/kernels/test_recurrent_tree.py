"""Recurrent layers along draft trees: a node has the bits of its path, however the path is run and committed."""

import itertools

import pytest
import torch
from support.recurrent_checks import (
    RAW,
    SHAPES,
    TREES,
    advanced,
    check_convolution,
    check_gates,
    check_scan,
    convolution_case,
    moved_windows,
    numbers,
    path_of,
    raw_rows,
    replayed,
    same,
    sample_of,
    scan_case,
)

from arbordraft.kernels import choice
from arbordraft.kernels.recurrent_tree import (
    ACTIVATIONS,
    Paths,
    Schedule,
    advance_states,
    advance_windows,
    commit_windows,
    gate,
    tree_convolution,
    tree_scan,
)
from arbordraft.kernels.recurrent_tree.arithmetic import exp, pairwise_sum, sqrt


@pytest.fixture(params=["reference", "native"])
def implementation(request):
    if request.param == "native":
        request.getfixturevalue("kernels")
    with choice.use("auto" if request.param == "native" else "reference"):
        choice.ran.clear()
        yield
        assert choice.ran
        assert all(name.endswith(f"/{request.param}") for name in choice.ran)


ROWS = range(len(TREES.parent))
LEAVES = [row for row in ROWS if row not in TREES.parent]


# Arithmetic


def test_gates_are_exact_to_a_few_units_in_the_last_place():
    x = numbers()
    x = x[x.abs() < 85]
    wide = x.double()
    exact = {
        "softplus": torch.log1p((-wide.abs()).exp()) + wide.clamp(min=0),
        "sigmoid": 1 / (1 + (-wide).exp()),
        "silu": wide / (1 + (-wide).exp()),
    }
    assert list(exact) == list(ACTIVATIONS)
    for activation, expected in exact.items():
        error = (gate(x[None], activation)[0].double() - expected).abs()
        assert (error <= 3 * 2.0**-23 * expected.abs() + 1e-37).all(), activation


def test_exponentials_are_exact_to_two_units_in_the_last_place():
    x = torch.cat([torch.linspace(-87.0, 88.0, 200_000), torch.linspace(-1e-3, 1e-3, 10_000)])
    expected = x.double().exp()
    unit = 2.0 ** (torch.frexp(expected).exponent - 24).double()
    assert ((exp(x).double() - expected).abs() <= 2 * unit).all()


def test_exponentials_at_the_ends_of_their_range():
    x = torch.tensor([0.0, -0.0, -103.0, -104.0, -torch.inf, 88.0, 89.0, torch.inf, torch.nan])
    found = exp(x)
    assert found[:2].tolist() == [1.0, 1.0]
    assert 0 < found[2] < 1e-44
    assert found[3:5].tolist() == [0.0, 0.0]
    assert found[5] == pytest.approx(1.6516e38, rel=1e-4)
    assert found[6:8].tolist() == [torch.inf, torch.inf]
    assert found[8].isnan()


def test_sums_have_one_order():
    tiny = 2.0**-24  # lost beside 1, but two of them are not
    assert pairwise_sum(torch.tensor([1.0, 0.0, tiny, tiny]), 0) == 1 + 2 * tiny
    assert pairwise_sum(torch.tensor([1.0, tiny, tiny, 0.0]), 0) == 1  # a control: another order loses both
    assert pairwise_sum(torch.tensor([1.0, 0.0, 0.0, 0.0, tiny, tiny, 2 * tiny]), 0) == 1 + 4 * tiny
    assert torch.equal(pairwise_sum(torch.arange(12.0).view(3, 4), 0), torch.tensor([12.0, 15.0, 18.0, 21.0]))


def test_square_roots_are_rounded_correctly():
    x = torch.rand(10000) * 100
    found = sqrt(x)
    below, above = (torch.nextafter(found, torch.tensor(end)).double() for end in (0.0, torch.inf))
    error = (found.double().square() - x.double()).abs()
    middle = ((found.double() + below) / 2, (found.double() + above) / 2)
    assert (middle[0].square() <= x.double()).all()
    assert (x.double() <= middle[1].square()).all()
    assert (error > 0).any()


# One definition


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", SHAPES)
def test_the_kernel_has_the_bits_of_the_reference(name):
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        check_scan(name)
    assert choice.ran["tree_scan/native"]


@pytest.mark.usefixtures("kernels")
def test_kernels_of_gates_and_convolutions_have_the_bits_of_the_reference():
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        check_gates()
        check_convolution()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("keys", [1, 2, 3, 15, 16, 17, 31, 32, 48, 100, 129])
def test_sums_over_any_number_of_keys(keys, monkeypatch):
    monkeypatch.setitem(SHAPES, "this", (2, 1, keys, 16, "head", True))
    check_scan("this")


def test_a_scan_is_the_recurrence():
    """Compares with float64, one row, head and key at a time."""
    for name in SHAPES:
        case = scan_case(name)
        out, schedule = case.run(), {}
        rows = {part: rows.double() for part, rows in case.rows.items()}
        heads, key_heads = rows["value"].shape[1], rows["key"].shape[1]
        for row, head in itertools.product(ROWS, range(heads)):
            query, key = (rows[part][row, head // (heads // key_heads)] for part in ("query", "key"))
            if epsilon := case.options.get("epsilon"):
                query, key = (x / (x.square().sum() + epsilon).sqrt() for x in (query, key))
            parent = TREES.parent[row]
            before = schedule[parent, head] if parent >= 0 else case.states[TREES.states[sample_of(row)], head].double()
            decay = rows["log_decay"][row, head]
            if "rates" in case.options:
                decay = decay * case.options["rates"][head].double()
            elif decay.dim():
                decay = decay[:, None]
            state = before * decay.exp()
            added = rows["value"][row, head]
            if "beta" in rows:
                added = rows["beta"][row, head] * (added - key @ state)
            schedule[row, head] = state = state + key[:, None] * added
            torch.testing.assert_close(
                out[row, head].double(), case.options["scale"] * (query @ state), rtol=1e-5, atol=1e-5
            )


# A node has the bits of its path


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("name", SHAPES)
def test_a_row_has_the_bits_of_its_path_alone(name):
    case = scan_case(name)
    packed = case.run()
    for leaf in LEAVES:
        path, state = path_of(leaf), TREES.states[sample_of(leaf)]
        alone = case.on(path, Paths.chains([len(path)], [state]))
        assert torch.equal(alone.run(), packed[path])
        states = case.states.clone()
        for place, row in enumerate(path):  # token by token, each committed
            one = case.on([row], Paths.chains([1], [state]))
            out = one.run(one.paths.schedule(commit=True), states=states)
            assert torch.equal(out[0], packed[row]), place


def test_another_parent_changes_the_bits():
    """Negative control: rows 3 and 4 hang on row 1; on its brother, row 2, they differ."""
    case = scan_case("gated delta")
    packed = case.run()
    wrong = Paths([-1, 0, 0, 2, 2, *TREES.parent[5:]], TREES.rows, TREES.states)
    other = case.on(list(ROWS), wrong).run()
    changed = [row for row in ROWS if not torch.equal(packed[row], other[row])]
    assert changed == [3, 4]


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("name", SHAPES)
def test_samples_and_siblings_change_no_bit(name):
    case = scan_case(name)
    packed = case.run()
    rows = [13, 14, 12, 0, 2, 5]  # two of the samples, in another order, with fewer rows
    fewer = Paths([-1, 0, -1, -1, 3, 4], [3, 3], [TREES.states[4], TREES.states[0]])
    assert torch.equal(case.on(rows, fewer).run(), packed[rows])


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("name", ["gated delta, odd sizes", "Mamba-2", "Mamba"])
def test_prompts_in_pieces_are_whole_prompts(name):
    """A chunk needs no scratch, and leaves the state that the whole prompt leaves."""
    paths = Paths.chains([20, 7], states=[1, 0])
    case = scan_case(name, paths)
    whole, states = case.states.clone(), case.states.clone()
    out = case.run(paths.schedule(commit=True), states=whole)
    pieces = []
    for begin, end in ((0, 3), (3, 11), (11, 20)):
        first = list(range(begin, end))
        second = list(range(20 + begin, min(20 + end, 27)))
        part = case.on(first + second, Paths.chains([len(first), len(second)], [1, 0]))
        found = part.run(part.paths.schedule(commit=True), states=states)
        pieces.append((first + second, found))
    for rows, found in pieces:
        assert torch.equal(found, out[rows])
    assert same(states, whole)
    assert not torch.equal(whole[:2], case.states[:2])


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_gate_does_not_depend_on_its_place(activation):
    x = numbers()[:, :301]
    rows = gate(x, activation)
    for begin, end in ((0, 1), (3, 20), (40, 301)):
        assert same(gate(x[1:, begin:end], activation), rows[1:, begin:end])
    assert not same(gate(x[1:, 1:20], activation), rows[1:, :19])  # control: their neighbours


# Commits


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("name", SHAPES)
def test_a_replayed_state_is_that_of_the_path(name):
    """Other states stay as they are; another node's state would be seen."""
    case = scan_case(name)
    ends = {0: 5, 2: 10, 4: 14}  # last accepted row by sample; samples 1 and 3 accept none
    committed = torch.tensor([TREES.states[sample] for sample in ends])

    def replayed(ends):
        replay = case.on(*TREES.accepted([ends.get(sample, -1) for sample in range(len(TREES.rows))]))
        states = case.states.clone()
        replay.run(replay.paths.schedule(commit=True), states=states)
        return states

    expected = case.states.clone()
    for sample, end in ends.items():  # token by token
        for row in path_of(end):
            one = case.on([row], Paths.chains([1], [TREES.states[sample]]))
            one.run(one.paths.schedule(commit=True), states=expected)
    found = replayed(ends)
    assert same(found, expected)
    others = [state for state in range(len(case.states)) if state not in committed]
    assert same(found[others], case.states[others])
    for wrong in ({0: 5, 2: 9, 4: 14}, {0: 2, 2: 10, 4: 14}):  # a sibling, a parent
        assert not torch.equal(replayed(wrong)[committed], found[committed])


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_convolutions_along_paths(width, dtype):
    inputs, windows, history, weight, bias = convolution_case(dtype, width)
    packed = tree_convolution(inputs, windows, history, weight, bias, activate=True)
    for leaf in LEAVES:
        path, state = path_of(leaf), TREES.states[sample_of(leaf)]
        chain = Paths.chains([len(path)], [state])
        alone = tree_convolution(inputs[path], windows, chain.history(width), weight, bias, activate=True)
        assert torch.equal(alone, packed[path])
        after = windows.clone()
        for row in path:  # token by token, each committed
            one = Paths.chains([1], [state])
            out = tree_convolution(inputs[[row]], after, one.history(width), weight, bias, activate=True)
            assert torch.equal(out[0], packed[row])
            commit_windows(after, inputs[[row]], one.windows([0], width), torch.tensor([state]))
        committed = windows.clone()
        commit_windows(committed, inputs[path], chain.windows([len(path) - 1], width), torch.tensor([state]))
        assert same(committed, after)
        full = torch.cat([windows[state], inputs[path]])
        assert torch.equal(committed[state], full[len(full) - width + 1 :])
        late = full[len(full) - width : -1]  # a window that lacks the last token
        assert not torch.equal(committed[state], late)


def test_windows_of_several_samples_are_committed_at_once():
    inputs, windows, *_ = convolution_case()
    ends = [5, -1, 10, -1, 14]
    after = windows.clone()
    commit_windows(after, inputs, TREES.windows(ends, 4), torch.tensor(TREES.states))
    for sample, end in enumerate(ends):
        path = path_of(end) if end >= 0 else []
        expected = torch.cat([windows[TREES.states[sample]], inputs[path]])[len(path) :]
        assert torch.equal(after[TREES.states[sample]], expected)
    assert after[4].isnan().all()  # no sample's


def test_a_convolution_is_pytorchs():
    inputs, windows, history, weight, bias = convolution_case()
    packed = tree_convolution(inputs, windows, history, weight, bias)
    path = path_of(11)
    full = torch.cat([windows[TREES.states[2]], inputs[path]])
    expected = torch.nn.functional.conv1d(full.T[None], weight.T[:, None], bias, groups=37)[0].T
    torch.testing.assert_close(packed[path], expected)
    with pytest.raises(AssertionError):  # one token late
        torch.testing.assert_close(packed[path][1:], expected[:-1])


# Accepted paths of all layers at once


@pytest.mark.parametrize("path", ["auto", "reference"])
@pytest.mark.parametrize(("name", "raw"), [*((name, False) for name in SHAPES), (RAW, True)])
def test_states_after_accepted_paths_are_those_of_scans(name, raw, path):
    states, scans, places = advanced(name, raw=raw)
    with choice.use(path):
        expected, found, other = replayed(states, scans), states.clone(), states.clone()
        advance_states(found, scans, *places)
        advance_states(other, scans, places[0].roll(1, 0), *places[1:])
    assert same(found, expected)
    assert not same(found, states)
    assert not same(other, expected)  # control: the path of another sample


@pytest.mark.parametrize(("width", "channels"), [(4, 37), (3, 64), (1, 5), (8, 16)])
def test_windows_after_accepted_paths(width, channels):
    windows, inputs, places, expected = moved_windows(torch.bfloat16, width, channels)
    advance_windows(windows, inputs, *places)
    assert same(windows, expected)


@pytest.mark.usefixtures("implementation")
def test_rows_of_mamba2_are_those_of_scans_with_decays():
    rows, case, schedule = raw_rows(), scan_case(RAW), TREES.schedule()
    steps = gate(rows.log_decay, "softplus", rows.bias).clamp(*rows.steps)
    scanned = {**case.rows, "value": rows.value * steps[..., None], "log_decay": steps * rows.rates}
    expected = tree_scan(case.states.clone(), schedule, **scanned) + rows.value * rows.skip[:, None]
    assert torch.equal(rows.run(case.states.clone(), schedule), expected)
    assert not torch.equal(rows._replace(bias=None).run(case.states.clone(), schedule), expected)  # control


@pytest.mark.usefixtures("implementation")
def test_rows_of_no_sample_get_zeros():
    case, schedule = scan_case("Mamba-2"), TREES.schedule()
    fewer = Schedule(schedule.first - schedule.first.gt(12) * 3, schedule.read, schedule.write, schedule.scratch)
    found = case.run(fewer)
    assert torch.equal(found[:12], case.run()[:12])
    assert not found[12:].any()

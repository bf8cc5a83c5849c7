"""Recurrent layers along draft trees: a node has the bits of its path, however the path is run and committed."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.recurrent_checks import (
    SHAPES,
    TREES,
    check_convolution,
    check_gates,
    check_scan,
    convolution_case,
    numbers,
    same,
    scan_case,
)
from torch import library

from arbordraft.kernels import choice
from arbordraft.kernels.recurrent_tree import (
    ACTIVATIONS,
    Paths,
    Schedule,
    commit_states,
    commit_windows,
    gate,
    replay_is_smaller,
    tree_convolution,
    tree_gated_delta,
    tree_scan,
    tree_selective_update,
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


def path_of(row, paths=TREES):
    """Returns the rows from a root to a row."""
    path = [row]
    while (parent := paths.parent[path[0]]) >= 0:
        path.insert(0, parent)
    return path


def sample_of(row, paths=TREES):
    ends = list(itertools.accumulate(paths.rows))
    return next(sample for sample, end in enumerate(ends) if row < end)


ROWS = range(len(TREES.parent))
LEAVES = [row for row in ROWS if row not in TREES.parent]


# The states and inputs on paths


def test_a_schedule_reads_the_row_before_where_it_can():
    found = Paths([-1, 0, 0, 1, 2, -1], rows=[5, 1], states=[7, 3]).schedule()
    assert found.first.tolist() == [0, 5, 6]
    assert found.read.tolist() == [7, -1, -2, -3, -2, 3]  # state 7, row 0, scratch 0, scratch 1, scratch 0, state 3
    assert found.write.tolist() == [-2, -3, -2, -1, -1, -1]  # row 2 takes the place of row 0, which has no child left
    assert found.scratch == 2


def test_a_schedule_that_keeps_all_states():
    found = Paths([-1, 0, 0, -1], rows=[3, 1], states=[0, 1]).schedule(keep=True)
    assert found.read.tolist() == [0, -2, -2, 1]
    assert found.write.tolist() == [-2, -3, -4, -5]
    assert found.scratch == 4


def test_a_schedule_of_chains_needs_no_scratch_and_commits_its_ends():
    paths = Paths.chains([3, 0, 1], states=[4, 2, 0])
    assert paths.parent == [-1, 0, 1, -1]
    found = paths.schedule(commit=True)
    assert found.read.tolist() == [4, -1, -1, 0]
    assert found.write.tolist() == [-1, -1, 4, 0]
    assert found.scratch == 0


@st.composite
def trees(draw):
    rows = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
    parent = []
    for count in rows:
        begin = len(parent)
        parent += [draw(st.sampled_from([-1, *range(begin, row)])) for row in range(begin, begin + count)]
    return Paths(parent, rows, draw(st.permutations(range(len(rows)))))


def states_read(paths, schedule, order):
    """Runs a schedule on symbols, sample after sample in the given order; returns the state that each row reads."""
    held = {state: ("committed", state) for state in paths.states}
    read = {}
    first = schedule.first.tolist()
    for sample in order:
        current = None
        for row in range(first[sample], first[sample + 1]):
            place = int(schedule.read[row])
            read[row] = current if place == -1 else held[place]
            current = ("row", row)
            if schedule.write[row] != -1:
                held[int(schedule.write[row])] = current
    return read


@given(trees(), st.booleans())
def test_a_schedule_hands_every_row_the_state_of_its_parent(paths, keep):
    schedule = paths.schedule(keep=keep)
    samples = range(len(paths.rows))
    expected = {
        row: ("row", parent) if parent >= 0 else ("committed", paths.states[sample_of(row, paths)])
        for row, parent in enumerate(paths.parent)
    }
    for order in (samples, reversed(samples)):
        assert states_read(paths, schedule, order) == expected
    used = {int(place) for place in schedule.write if place < -1}
    assert used == {-2 - place for place in range(schedule.scratch)}
    owners = [(int(schedule.write[row]), sample_of(row, paths)) for row in range(len(paths.parent))]
    places = {owner for owner in owners if owner[0] < -1}
    assert len(places) == schedule.scratch  # no two samples write one scratch state: they may run at the same time


def test_a_schedule_with_a_wrong_parent_would_be_seen():
    schedule = TREES.schedule()
    schedule.read[2] = -1  # that of row 1, its brother
    read = states_read(TREES, schedule, range(len(TREES.rows)))
    assert read[2] == ("row", 1) != ("row", TREES.parent[2])


def test_history_ends_in_the_committed_window():
    paths = Paths([-1, 0, 1, 2, 0, -1], rows=[5, 1], states=[1, 0])
    committed = [-1 - (1 * 3 + place) for place in range(3)]  # window rows of state 1, the oldest first
    assert paths.history(4).tolist() == [
        committed,
        [*committed[1:], 0],
        [committed[2], 0, 1],
        [0, 1, 2],
        [*committed[1:], 0],
        [-1, -2, -3],
    ]
    assert paths.windows([3, -1], 4).tolist() == [[1, 2, 3], [-1, -2, -3]]
    assert paths.windows([0, 5], 4).tolist() == [[*committed[1:], 0], [-2, -3, 5]]
    assert paths.history(1).shape == (6, 0)
    assert Paths([], [0], [0]).history(3).shape == (0, 2)
    assert Paths([], [0], [0]).windows([-1], 3).tolist() == [[-1, -2]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([-1, 0], [3], [0]), "1 samples of 3 rows"),
        (([-1, 0], [1, 1], [0]), "2 samples of 2 rows"),
        (([-1, 0], [1, 1], [0, 1]), "parent of row 1 must be an earlier row of its sample"),
        (([-1, 1], [2], [0]), "parent of row 1 must be an earlier row"),
        (([-2], [1], [0]), "parent of row 0 must be"),
        (([-1, -1], [1, 1], [4, 4]), r"a committed state of its own, got \[4, 4\]"),
        (([-1], [1], [-1]), "a committed state of its own"),
    ],
)
def test_paths_that_cannot_be_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Paths(*arguments)


def test_accepted_rows_are_chains():
    rows, chains = TREES.accepted([5, -1, 10, -1, 14])
    assert rows == [0, 2, 5, 8, 9, 10, 13, 14] == [*path_of(5), *path_of(10), *path_of(14)]
    assert chains == Paths.chains([3, 0, 3, 0, 2], TREES.states)


def test_only_chains_commit():
    with pytest.raises(ValueError, match="only a chain of rows ends in one state"):
        TREES.schedule(commit=True)
    with pytest.raises(ValueError, match="sample 1 has rows 2 to 2, and 1 cannot be its last one"):
        Paths([-1, 0, -1], [2, 1], [0, 1]).windows([0, 1], 3)
    with pytest.raises(ValueError, match="and 2 cannot be its last one"):
        Paths([-1, 0, -1], [2, 1], [0, 1]).accepted([2, -1])


# Arithmetic


def test_gates_are_exact_to_a_few_units_in_the_last_place():
    x = numbers()
    x = x[x.abs() < 85]
    wide = x.double()
    exact = {
        "softplus": torch.log1p(-wide.abs().neg().exp() * -1) + wide.clamp(min=0),
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


# Commits


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("name", SHAPES)
def test_a_copied_state_is_the_replayed_one(name):
    """Other states stay as they are; another node's state would be seen."""
    case = scan_case(name)
    schedule = TREES.schedule(keep=True)
    scratch = case.states.new_empty(schedule.scratch, *case.states.shape[1:])
    case.run(schedule, scratch)
    ends = {0: 5, 2: 10, 4: 14}  # last accepted row by sample; samples 1 and 3 accept none
    committed = torch.tensor([TREES.states[sample] for sample in ends])

    copied = case.states.clone()
    commit_states(copied, scratch, committed, torch.tensor(list(ends.values())))
    replay = case.on(*TREES.accepted([ends.get(sample, -1) for sample in range(len(TREES.rows))]))
    replayed = case.states.clone()
    replay.run(replay.paths.schedule(commit=True), states=replayed)
    assert same(copied, replayed)
    others = [state for state in range(len(case.states)) if state not in committed]
    assert same(copied[others], case.states[others])

    for wrong in (scratch[[5, 9, 14]], scratch[[2, 10, 14]]):  # a sibling, a parent
        assert not torch.equal(wrong, copied[committed])


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


def test_bytes_decide_between_copies_and_replays():
    states = torch.empty(3, 32, 128, 128)
    step = [torch.empty(5, 16, 128, dtype=torch.bfloat16)] * 2 + [torch.empty(5, 32, 128), torch.empty(5, 32)]
    assert replay_is_smaller(states, *step)
    assert not replay_is_smaller(torch.empty(3, 1, 1, 64), torch.empty(5, 64), torch.empty(5, 64))


# Entry points


def test_rounding_of_inputs_is_the_callers():
    case = scan_case("gated delta, odd sizes")
    rows = {name: part.bfloat16() for name, part in case.rows.items()}
    wide = {name: part.float() for name, part in rows.items()}
    schedule = TREES.schedule()
    out = tree_gated_delta(case.states.clone(), schedule, **rows)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, tree_gated_delta(case.states.clone(), schedule, **wide).bfloat16())
    plain = tree_gated_delta(case.states.clone(), schedule, **wide, normalize=False)
    assert not torch.equal(out.float(), plain)


def test_inputs_of_any_layout(implementation):
    case = scan_case("Mamba")
    apart = {name: part.transpose(0, -1).contiguous().transpose(0, -1) for name, part in case.rows.items()}
    rates = case.options["rates"].transpose(1, 2).contiguous().transpose(1, 2)
    assert not rates.is_contiguous()
    found = tree_scan(case.states.clone(), TREES.schedule(), **apart, rates=rates, scale=case.options["scale"])
    assert torch.equal(found, case.run())
    arguments = convolution_case()
    strided = [torch.stack([part, part], dim=-1)[..., 0] for part in arguments]
    assert not any(part.is_contiguous() for part in strided)
    assert torch.equal(tree_convolution(*strided), tree_convolution(*arguments))
    assert torch.equal(gate(strided[0], "silu", strided[4]), gate(arguments[0], "silu", arguments[4]))


def refusals():
    case = scan_case("gated delta, odd sizes")
    schedule, rows = TREES.schedule(), case.rows
    inputs, windows, history, weight, bias = convolution_case()

    def scan(**changes):
        arguments = {"states": case.states, "schedule": schedule, **rows} | changes
        return lambda: tree_scan(**arguments)

    def convolve(**changes):
        arguments = {"inputs": inputs, "windows": windows, "history": history, "weight": weight, "bias": bias} | changes
        return lambda: tree_convolution(**arguments)

    return [
        (scan(states=case.states.double()), r"states must be \[any, 3, 7, 5\] of torch.float32"),
        (scan(key=rows["key"][:, :2], query=rows["query"][:, :2]), "2 key heads cannot serve 3 heads"),
        (scan(states=case.states.transpose(2, 3).contiguous().transpose(2, 3)), "so they must be contiguous"),
        (scan(query=rows["query"][:-1]), r"query must be \[15, 3, 7\]"),
        (scan(value=rows["value"][..., :4]), r"value must be \[15, 3, 5\]"),
        (scan(log_decay=rows["log_decay"][:, :2]), r"log_decay must be \[15, 3\]"),
        (scan(beta=rows["beta"][:, :2]), r"beta must be \[15, 3\]"),
        (scan(schedule=Paths.chains([3], [0]).schedule()), r"read must be \[15\] of torch.int64"),
        (scan(scratch=torch.empty(1, 3, 7, 5)), "the schedule needs 3 scratch states, got 1"),
        (scan(rates=torch.empty(3, 7, 4)), r"rates must be \[3, 7, 5\]"),
        (convolve(windows=windows.bfloat16()), r"windows must be \[any, 3, 37\] of torch.float32"),
        (convolve(history=history[:-1]), r"history must be \[15, 3\]"),
        (convolve(weight=weight.bfloat16()), "weight must be"),
        (convolve(bias=bias[:-1]), r"bias must be \[37\]"),
        (lambda: gate(inputs, "gelu"), "there is no activation 'gelu'; choose one of softplus, sigmoid, silu"),
        (lambda: gate(inputs, "silu", bias[:3]), r"bias must be \[37\]"),
        (lambda: commit_windows(windows, inputs.bfloat16(), history[:5], torch.arange(5)), "inputs must be"),
        (lambda: commit_states(case.states, torch.empty(2, 3, 7, 4), *torch.zeros(2, 1).long()), "scratch must be"),
        (
            lambda: tree_selective_update(
                torch.zeros(1, 2, 4, 3), schedule, torch.zeros(15, 2, 3), torch.zeros(15, 3), *[torch.zeros(2)] * 3
            ),
            r"steps must be \[15, 2\]",
        ),
    ]


@pytest.mark.parametrize("case", range(len(refusals())))
def test_wrong_arguments_are_refused(case):
    call, message = refusals()[case]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.usefixtures("kernels")
def test_the_kernel_refuses_states_that_do_not_exist():
    case = scan_case("Mamba-2")
    good = TREES.schedule()
    for part, row, place, message in (
        ("read", 0, len(case.states), "row 0 needs a state that does not exist"),
        ("write", 3, -2 - good.scratch, "row 3 needs a state that does not exist"),
        ("read", 7, -1, "no row comes before the first of sample 1"),
    ):
        places = {name: getattr(good, name).clone() for name in ("first", "read", "write")}
        places[part][row] = place
        with pytest.raises(RuntimeError, match=message):
            case.run(Schedule(**places, scratch=good.scratch))
    inputs, windows, history, weight, _ = convolution_case()
    history[4, 1] = -1 - windows.shape[0] * 3
    with pytest.raises(RuntimeError, match="row 4 has an input before it that is nowhere"):
        tree_convolution(inputs, windows, history, weight)


def test_no_rows(implementation):
    empty = Paths([], [0, 0], [1, 0])
    case = scan_case("gated delta, odd sizes").on([], empty)
    assert case.run(empty.schedule()).shape == (0, 3, 5)
    inputs, windows, _, weight, _ = convolution_case()
    assert tree_convolution(inputs[:0], windows, empty.history(4), weight).shape == (0, 37)
    assert gate(inputs[:0], "silu").shape == (0, 37)


@pytest.mark.usefixtures("kernels")
def test_the_operators_are_registered_properly_and_compile():
    case = scan_case("gated delta, odd sizes")
    case.states.nan_to_num_()
    schedule = TREES.schedule()
    scratch = torch.zeros(schedule.scratch, 3, 7, 5)
    places = schedule.first, schedule.read, schedule.write
    rows = case.rows
    order = rows["query"], rows["key"], rows["value"], rows["log_decay"]
    inputs, windows, history, weight, bias = convolution_case()
    ops = torch.ops.arbordraft
    for operator, arguments in (
        (ops.tree_scan, (case.states, scratch, *places, *order, None, rows["beta"], 0.5, 1e-6, schedule.scratch)),
        (ops.tree_convolution, (inputs, windows.nan_to_num(), history, weight, bias, True)),
        (ops.recurrent_gate, (inputs, bias, None, 0)),
    ):
        for overload in (operator.default, operator.portable):
            library.opcheck(overload, arguments)
            compiled = torch.compile(overload, fullgraph=True, backend="aot_eager")
            assert torch.equal(compiled(*arguments), overload(*arguments))

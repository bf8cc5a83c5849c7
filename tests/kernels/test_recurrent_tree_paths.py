"""States and inputs on the paths of rows, on symbols."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.recurrent_checks import TREES, path_of, sample_of

from arbordraft.kernels.recurrent_tree import Paths


def test_a_schedule_reads_the_row_before_where_it_can():
    found = Paths([-1, 0, 0, 1, 2, -1], rows=[5, 1], states=[7, 3]).schedule()
    assert found.first.tolist() == [0, 5, 6]
    assert found.read.tolist() == [7, -1, -2, -3, -2, 3]  # state 7, row 0, scratch 0, scratch 1, scratch 0, state 3
    assert found.write.tolist() == [-2, -3, -2, -1, -1, -1]  # row 2 takes the place of row 0, which has no child left
    assert found.scratch == 2


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


@given(trees())
def test_a_schedule_hands_every_row_the_state_of_its_parent(paths):
    schedule = paths.schedule()
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

"""Tokens and counts of two thousand decoders equal the recorded ones; ``support/behaviour.py`` lists the decoders."""

import pytest
from support import behaviour

from arbordraft.kernels import native

REWRITE = "if the change is wanted, rewrite the file: .venv/bin/python tests/support/behaviour.py --processes 2"


def differing(names):
    """Returns a line for each configuration whose hash differs from the file."""
    known, missing = behaviour.recorded(), native.problem()
    names = [name for name in names if not (missing and behaviour.everything()[name].kernels == "native")]
    found = {name: behaviour.hash_of(name) for name in names}
    return [f"{name}: {found[name]}, recorded {known.get(name)}" for name in names if found[name] != known.get(name)]


def check(names):
    lines = differing(names)
    if lines:
        pytest.fail("\n".join([f"{len(lines)} of {len(names)} configurations differ", *lines, REWRITE]), pytrace=False)


@pytest.mark.parametrize("part", range(4))
def test_a_tenth_of_the_configurations(part):
    check(behaviour.tenth()[part::4])


@pytest.mark.soak
@pytest.mark.parametrize("number", range(behaviour.CHUNKS))
def test_all_configurations(number):
    check(behaviour.chunk(number))


def test_the_file_holds_each_configuration_once():
    lines = [line for line in behaviour.GOLDEN.read_text().splitlines() if not line.startswith("#")]
    known = behaviour.recorded()
    assert len(lines) == len(known) >= 1500
    assert sorted(known.keys() ^ behaviour.everything().keys()) == [], REWRITE
    assert behaviour.GOLDEN.stat().st_size <= 210_000


def test_a_tenth_has_all_values():
    chosen = [behaviour.configurations()[name] for name in behaviour.tenth() if name in behaviour.configurations()]
    for axis, values in behaviour.AXES.items():
        assert {getattr(one, axis) for one in chosen} == set(values)


def test_all_triples_and_pairs_are_covered():
    found = behaviour.configurations().values()
    triples = {(one.drafter, one.coupling, one.decider) for one in found}
    triples |= {tuple(name.split()[:3]) for name in behaviour.FRAGILE}
    for drafter in behaviour.DRAFTERS:
        for coupling in behaviour.COUPLINGS:
            for decider in behaviour.DECIDERS:
                expected = behaviour.valid(drafter, coupling, decider)
                assert ((drafter, coupling, decider) in triples) == expected
    for axis in ("settings", "mode", "step", "kernels", "target"):
        pairs = {(one.drafter, getattr(one, axis)) for one in found}
        assert len(pairs) == len(behaviour.DRAFTERS) * len(behaviour.AXES[axis])


def test_one_token_or_count_changes_the_hash():
    """Negative control: one token or count changes; the order of counts does not matter."""
    found = behaviour.outcome(behaviour.everything()[behaviour.tenth()[-1]])
    other_tokens = [[*found.tokens[0][:-1], found.tokens[0][-1] ^ 1], *found.tokens[1:]]
    assert found._replace(tokens=other_tokens).hash != found.hash
    for name, value in found.counts.items():
        if isinstance(value, int):
            assert found._replace(counts={**found.counts, name: value + 1}).hash != found.hash
    assert found._replace(counts=dict(reversed(found.counts.items()))).hash == found.hash


def test_another_decoder_is_named(monkeypatch):
    """Negative control: a decider stops one level earlier."""
    names = [name for name in behaviour.everything() if name.startswith("model iid") and " depth2 " in name]
    assert len(names) > 2
    monkeypatch.setitem(behaviour.DECIDERS, "depth2", lambda: behaviour.FixedDepth(1))
    assert [line.partition(":")[0] for line in differing(names)] == names

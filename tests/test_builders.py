"""Decoders of the literature are wired as in their papers, and decode like the target."""

import pytest
from support.models import PAYS, check_greedy, ragged

from arbordraft import CostAware, NGramDrafter, SpeculativeDecoder, TreeTopology, builders
from arbordraft.deciders import FixedDepth, NodeBudget
from arbordraft.drafters import Drafter

DRAFT = ragged(seed=3)
DECODERS = {
    "ems_sd, lookup": lambda: builders.ems_sd(ragged()),
    "ems_sd, own lookup": lambda: builders.ems_sd(ragged(), NGramDrafter(3, 1), length=4),
    "ems_sd, draft model": lambda: builders.ems_sd(ragged(), DRAFT, length=4),
    "specinfer": lambda: builders.specinfer(ragged(), DRAFT),
    "mcsd": lambda: builders.mcsd(ragged(), DRAFT),
    "spechub": lambda: builders.spechub(ragged(), DRAFT),
    "sequoia": lambda: builders.sequoia(ragged(), DRAFT, (0.6, 0.2, 0.1), nodes=9),
    "lookup": lambda: builders.lookup(ragged(), PAYS),
    "cost_aware": lambda: builders.cost_aware(ragged(), DRAFT, 4, costs=PAYS),
    "eagle2": lambda: builders.eagle2(ragged(), DRAFT, 4, max_depth=3),
}
WIRING = {  # (tops, tails, replacement) of the law, rule or verifier, topology
    "ems_sd, lookup": ((1, 0, False), "SharedMatching", TreeTopology.chain(7)),
    "ems_sd, own lookup": ((1, 0, False), "SharedMatching", TreeTopology.chain(4)),
    "ems_sd, draft model": ((0, 1, True), "RecursiveRejection", TreeTopology.chain(4)),
    "specinfer": ((0, 3, True), "RecursiveRejection", TreeTopology.from_k_config((1, 1, 3, 1, 1, 1, 1, 1))),
    "mcsd": ((0, 4, False), "RecursiveRejection", TreeTopology.from_k_config((4, 2, 2))),
    "spechub": ((1, 1, False), "SpecHub", TreeTopology.k_ary(2, 4)),
    "sequoia": ((0, 3, False), "RecursiveRejection", TreeTopology.sequoia((0.6, 0.2, 0.1), 9)),
    "lookup": ((1, 0, False), "SharedMatching", TreeTopology.chain(12)),
    "cost_aware": ((4, 0, False), "SharedMatching", TreeTopology.sequoia(Drafter.acceptance, 16, 6)),
    "eagle2": ((5, 0, False), "SharedMatching", TreeTopology.sequoia(Drafter.acceptance, 16, 3)),
}


@pytest.mark.parametrize("name", DECODERS)
def test_wiring(name):
    decoder = DECODERS[name]()
    law, verifier = decoder.coupling.law, decoder.coupling.verifier
    found = (
        (law.tops, law.tails, law.replacement),
        type(getattr(verifier, "rule", verifier)).__name__,
        decoder.topology.parent_list,
    )
    split, rule, topology = WIRING[name]
    assert found == (split, rule, topology.parent_list)
    assert type(verifier).__name__ == ("SharedMatching" if rule == "SharedMatching" else "TopDown")
    assert decoder.coupling.exactness == ("pathwise" if rule == "SharedMatching" else "exact")


def test_spechub_uses_the_order_of_the_paper():
    assert DECODERS["spechub"]().coupling.verifier.rule.order == "paper"


@pytest.mark.parametrize("name", DECODERS)
def test_every_builder_decodes_like_the_target(name):
    check_greedy(DECODERS[name]())


def test_builders_choose_the_decider():
    found = {name: type(DECODERS[name]().decider) for name in DECODERS}
    own = {"lookup": CostAware, "cost_aware": CostAware, "eagle2": NodeBudget}
    assert found == dict.fromkeys(DECODERS, FixedDepth) | own
    assert builders.cost_aware(ragged(), DRAFT, 4, costs=PAYS).decider.nodes == 4
    assert builders.cost_aware(ragged(), DRAFT, costs=PAYS).decider.costs is PAYS
    assert builders.lookup(ragged(), PAYS.target).decider.costs.target is PAYS.target


@pytest.mark.parametrize("part", ["target", "drafter", "topology", "coupling", "decider"])
def test_parts_of_a_finished_decoder_are_not_exchanged(part):
    decoder = SpeculativeDecoder(ragged(), NGramDrafter())
    with pytest.raises(AttributeError, match=f"make another one with {part}="):
        setattr(decoder, part, getattr(decoder, part))


def test_plain_models_are_wrapped():
    decoder = builders.mcsd(ragged().model, DRAFT.model, k_config=(2,))
    assert decoder.target.model is ragged().model
    assert decoder.drafter.model.model is DRAFT.model

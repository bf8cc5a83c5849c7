"""The draft laws that are compared, with the rules and verifiers that are valid for each."""

from collections.abc import Mapping
from contextlib import suppress

from arbordraft.sampling.laws import IID, DraftLaw, SharedNoise, TopTail, WithoutReplacement
from arbordraft.trees.topology import TreeTopology
from arbordraft.verifiers import (
    GlobalResolution,
    GreedyMultiPath,
    KSeq,
    Lifted,
    RecursiveRejection,
    Rule,
    SpecHub,
    TopDown,
    TopTailRule,
    TreeVerifier,
)


def laws_of(k: int, resolution: GlobalResolution | None = None) -> dict[str, tuple[DraftLaw, dict[str, Rule]]]:
    """Returns the draft laws for k children, and the valid rules of each; shared noise has no rule."""
    rejection, resolution = RecursiveRejection(), resolution or GlobalResolution()
    laws: dict[str, tuple[DraftLaw, dict[str, Rule]]] = {
        f"IID({k})": (IID(k), {"RRS": rejection, "K-SEQ": KSeq(), "global resolution": resolution}),
        f"WithoutReplacement({k})": (WithoutReplacement(k), {"RRS": rejection}),
        f"SharedNoise({k})": (SharedNoise(k), {}),
    }
    if k == 2:
        laws["TopTail(1,1)"] = TopTail(1, 1), {"SpecHub, paper's order": SpecHub("paper"), "SpecHub": SpecHub()}
    else:
        laws |= {f"TopTail({m},{k - m})": (TopTail(m, k - m), {"TopTail": TopTailRule()}) for m in range(1, k)}
    return laws


def verifiers_of(law: DraftLaw, rules: Mapping[str, Rule], topology: TreeTopology) -> dict[str, TreeVerifier]:
    """Returns the verifiers by these rules, and multi-path verification if it is valid for law and tree."""
    verifiers: dict[str, TreeVerifier] = {
        f"{kind.__name__}({name})": kind(rule) for name, rule in rules.items() for kind in (TopDown, Lifted)
    }
    paths = GreedyMultiPath()
    if paths.supports(law) and law.k > 1:  # a single path is judged by block verification, as by Lifted(RRS)
        with suppress(ValueError):
            paths.check(topology)
            verifiers["multi-path"] = paths
    return verifiers

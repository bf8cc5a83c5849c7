"""Verification: rules decide at one node, tree verifiers decide about a whole tree."""

from arbordraft.verifiers.k_seq import KSeq
from arbordraft.verifiers.longest_branch import LongestBranch
from arbordraft.verifiers.paths import GreedyMultiPath
from arbordraft.verifiers.resolution import GlobalResolution
from arbordraft.verifiers.rules import Matching, NodeLaw, RecursiveRejection, Remembered, Rule, TopTailRule
from arbordraft.verifiers.spechub import SpecHub
from arbordraft.verifiers.transport import OptimalTransport, optimal_acceptance
from arbordraft.verifiers.trees import (
    Lifted,
    RuleVerifier,
    SharedMatching,
    TopDown,
    TreeVerifier,
    TypicalAcceptance,
    matching_verdict,
)

__all__ = [
    "GlobalResolution",
    "GreedyMultiPath",
    "KSeq",
    "Lifted",
    "LongestBranch",
    "Matching",
    "NodeLaw",
    "OptimalTransport",
    "RecursiveRejection",
    "Remembered",
    "Rule",
    "RuleVerifier",
    "SharedMatching",
    "SpecHub",
    "TopDown",
    "TopTailRule",
    "TreeVerifier",
    "TypicalAcceptance",
    "matching_verdict",
    "optimal_acceptance",
]

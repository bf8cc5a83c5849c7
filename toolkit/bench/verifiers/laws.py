"""The draft laws that are compared, and the rules that are valid for each."""

from arbordraft.sampling.laws import IID, DraftLaw, SharedNoise, TopTail, WithoutReplacement
from arbordraft.verifiers import GlobalResolution, KSeq, RecursiveRejection, Rule, SpecHub, TopTailRule


def laws_of(k: int, resolution: GlobalResolution | None = None) -> dict[str, tuple[DraftLaw, dict[str, Rule]]]:
    """Returns the draft laws for k children, and the valid rules of each; shared noise has no rule."""
    rejection, resolution = RecursiveRejection(), resolution or GlobalResolution()
    laws: dict[str, tuple[DraftLaw, dict[str, Rule]]] = {
        f"IID({k})": (
            IID(k),
            {"RRS": rejection, "K-SEQ": KSeq(), "global resolution": resolution},
        ),
        f"WithoutReplacement({k})": (WithoutReplacement(k), {"RRS": rejection}),
        f"SharedNoise({k})": (SharedNoise(k), {}),
    }
    if k == 2:
        laws["TopTail(1,1)"] = TopTail(1, 1), {"SpecHub, paper's order": SpecHub("paper"), "SpecHub": SpecHub()}
    else:
        laws |= {f"TopTail({m},{k - m})": (TopTail(m, k - m), {"TopTail": TopTailRule()}) for m in range(1, k)}
    return laws

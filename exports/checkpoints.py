"""Reading a trained head as it was stored, for engines that take no other dtype."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arbordraft.checkpoints import CONFIG, few, read_config, read_tensors

if TYPE_CHECKING:
    from arbordraft.heads.base import DraftHead

EAGLE, MEDUSA, EXIT_ADAPTER = "arbordraft_eagle", "arbordraft_medusa", "arbordraft_exit_adapter"


def read_head(folder: str | os.PathLike[str]) -> "DraftHead":
    """A trained EAGLE or Medusa head, in the dtype that it was stored in.

    Raises:
        ValueError: if the folder holds something else, or its weights do not fit its settings.
    """
    from arbordraft.heads.base import vocabulary_problems
    from arbordraft.heads.eagle import EagleConfig, EagleHead
    from arbordraft.heads.medusa import MedusaConfig, MedusaHead

    config = read_config(folder)
    kinds: dict[str, tuple[Any, Any]] = {EAGLE: (EagleConfig, EagleHead), MEDUSA: (MedusaConfig, MedusaHead)}
    kind = config.get("model_type", config.get("class"))
    if kind not in kinds:
        raise ValueError(f"{folder} holds a {kind!r}, not an EAGLE or Medusa head")
    settings, network = kinds[kind]
    try:
        head: DraftHead = network(settings.from_dict(config))
    except Exception as error:  # transformers' strict settings raise errors of their own
        raise ValueError(f"{Path(folder) / CONFIG} describes no {network.__name__}: {error}") from error
    tensors = read_tensors(folder)
    expected = {name: tensor.shape for name, tensor in head.state_dict().items()}
    problems = differences(expected, {name: tensor.shape for name, tensor in tensors.items()})
    if problems:
        raise ValueError(f"the weights in {folder} do not fit its {CONFIG}: {'; '.join(problems)}")
    floats = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    if len(floats) != 1:
        raise ValueError(f"the weights in {folder} must share one dtype, got {sorted(map(str, floats))}")
    head.to(floats.pop())  # type: ignore[arg-type]
    head.load_state_dict(tensors)
    if problems := vocabulary_problems(head.d2t, head.t2d):
        raise ValueError(f"the draft vocabulary in {folder} is damaged: {'; '.join(problems)}")
    return head.eval()


def differences(expected: "dict[str, Any]", actual: "dict[str, Any]") -> list[str]:
    """What distinguishes two tables, in words; empty if nothing does."""
    problems = []
    if missing := sorted(expected.keys() - actual.keys()):
        problems.append(f"missing {few(missing)}")
    if extra := sorted(actual.keys() - expected.keys()):
        problems.append(f"unexpected {few(extra)}")
    problems += [
        f"{name} is {_brief(actual[name])} instead of {_brief(value)}"
        for name, value in expected.items()
        if name in actual and actual[name] != value
    ]
    return problems


def _brief(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)

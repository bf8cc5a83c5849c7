"""Describes a decoder as plain data (names and arguments of its parts), and builds it again elsewhere."""

import dataclasses
import inspect
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

import arbordraft as ad
from arbordraft import deciders, drafters, verifiers
from arbordraft.deciders import Decider, LearnedDecider, costs
from arbordraft.deciders.costs import StepCosts
from arbordraft.drafters import Drafter
from arbordraft.drafters.onnx_networks import OnnxNetwork
from arbordraft.heads.base import fingerprint
from arbordraft.loading import load_target
from arbordraft.sampling import laws
from arbordraft.sampling.laws import DraftLaw
from arbordraft.utils.choices import Dtype, Kernels
from arbordraft.verifiers import Rule, TreeVerifier

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FILE, DECIDER = "decoder.json", "decider"  # the config, and the folder of a trained decider beside it
_PARTS = (DraftLaw, Rule, TreeVerifier, Decider, Drafter)
_TABLES = (ad.CostTable, StepCosts)
# Only these classes are ever called by their names in a file.
_KINDS = {
    name: kind
    for module in (costs, deciders, drafters, laws, verifiers)
    for name, kind in vars(module).items()
    if isinstance(kind, type) and issubclass(kind, _PARTS + _TABLES)
}
_TRAINED = (ad.BlockDrafter, ad.DFlashDrafter, ad.EagleDrafter, ad.MedusaDrafter, ad.LanguageModelDrafter)
# Drafters around the target itself: the name of the target among their arguments, and the other arguments.
_AROUND: dict[type, tuple[str, tuple[str, ...]]] = {
    ad.EarlyExitDrafter: ("model", ("layers",)),
    ad.MtpDrafter: ("target", ()),
    ad.SelfDrafter: ("target", ("weights",)),
}

Description = Any  # of a part: {"class": name, "arguments": {...}}; of any other value: itself


@dataclass(frozen=True)
class TargetReference:
    """A reference to a decoder's target by name; its weights are not copied.

    Args:
        name: hub name or folder; ``smollm2`` means SmolLM2-135M-Instruct.
        dtype: dtype of its weights.
        kernels: how weights are read, see :class:`~arbordraft.RaggedModel`.
        fingerprint: fingerprint of the weights, see :func:`arbordraft.heads.base.fingerprint`.
        weights: bits of the weights that kernels read, see :class:`~arbordraft.RaggedModel`.
    """

    name: str
    dtype: str
    kernels: str
    fingerprint: str
    weights: str | None = None

    def load(self) -> "tuple[ad.RaggedModel, PreTrainedTokenizerBase]":
        """Loads the model and its tokenizer.

        Raises:
            ValueError: if the fingerprint of its weights has changed.
        """
        target, tokenizer = load_target(self.name, Dtype(self.dtype), Kernels(self.kernels), self.weights)
        if (actual := fingerprint(target.model)) != self.fingerprint:
            raise ValueError(
                f"{self.name} is not the target that this decoder was made for: its fingerprint is {actual} instead of "
                f"{self.fingerprint}; bring back the old weights, or log the decoder again"
            )
        return target, tokenizer


@dataclass(frozen=True)
class DecoderConfig:
    """The parts of a :class:`~arbordraft.SpeculativeDecoder`.

    Args:
        target: the target.
        drafter: the drafter, without the weights of a trained one.
        trained: where these weights lie: a hub name, or a folder beside this config; ``None`` if there are none.
        parents: the topology, see :meth:`~arbordraft.TreeTopology.from_parents`.
        law: the law by which children are drawn.
        verifier: the verifier of whole trees.
        decider: the decider, which stops drafting.
        max_cache_tokens: bound on the rows of each KV cache.
        expected_batch: see :class:`~arbordraft.SpeculativeDecoder`.
        generation_config: source of the settings that a request leaves open.
    """

    target: TargetReference
    drafter: Description
    trained: str | None
    parents: list[int]
    law: Description
    verifier: Description
    decider: Description
    max_cache_tokens: int | None = None
    expected_batch: int = 1
    generation_config: str = "model"

    @classmethod
    def of(cls, decoder: ad.SpeculativeDecoder, target: str, trained: str | None = None) -> "DecoderConfig":
        """Describes a decoder.

        Args:
            decoder: the decoder.
            target: hub name or folder that its target was loaded from.
            trained: hub name or folder that its trained drafter was loaded from, if it has one.

        Raises:
            ValueError: if a part cannot be described as plain data, or ``trained`` is needed and missing.
        """
        if type(decoder) is not ad.SpeculativeDecoder:
            raise ValueError(f"a {type(decoder).__name__} cannot be described: only SpeculativeDecoder itself can")
        needed = any(isinstance(part, Drafter) and _is_trained(part) for part in decoder.drafter.modules())
        if needed and trained is None:
            raise ValueError(f"name the folder or hub name that the {type(decoder.drafter).__name__} was loaded from")
        model, kernels = decoder.target.model, "torch" if decoder.target.backend == "torch" else "auto"
        dtype = str(model.dtype).removeprefix("torch.")
        return cls(
            TargetReference(target, dtype, kernels, fingerprint(model), decoder.target.weights),
            describe(decoder.drafter),
            trained if needed else None,
            list(decoder.topology.parent_list),
            describe(decoder.coupling.law),
            describe(decoder.coupling.verifier),
            describe(decoder.decider),
            decoder.max_cache_tokens,
            decoder.expected_batch,
            decoder.generation_config,
        )

    def build(self, folder: str | os.PathLike[str]) -> "tuple[ad.SpeculativeDecoder, PreTrainedTokenizerBase]":
        """Builds the decoder again; returns it with its target's tokenizer.

        Args:
            folder: folder that holds ``trained`` and a trained decider.

        Raises:
            ValueError: if a part is unknown or damaged, or the target has changed.
        """
        target, tokenizer = self.target.load()
        here = Path(folder)
        trained = self.trained if self.trained is None or not (here / self.trained).is_dir() else here / self.trained
        decoder = ad.SpeculativeDecoder(
            target,
            _drafter(self.drafter, target, trained),
            ad.TreeTopology.from_parents(self.parents),
            ad.Coupling(rebuild(self.law, here), rebuild(self.verifier, here)),
            rebuild(self.decider, here),
            max_cache_tokens=self.max_cache_tokens,
            expected_batch=self.expected_batch,
            generation_config=self.generation_config,
        )
        return decoder, tokenizer

    def save(self, path: Path) -> None:
        """Writes the description as JSON."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> "DecoderConfig":
        """Reads a file that :meth:`save` wrote.

        Raises:
            ValueError: if the file describes no decoder.
        """
        try:
            fields = json.loads(path.read_text())
            return cls(**fields | {"target": TargetReference(**fields["target"])})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} describes no decoder: {error}") from error


def describe(part: Any) -> Description:
    """Describes a part, or a setting of one, as plain data.

    Raises:
        ValueError: if it is neither a part nor a setting.
    """
    if part is None or isinstance(part, bool | int | float | str):
        return part
    if isinstance(part, list | tuple | nn.ModuleList):
        return [describe(item) for item in part]
    name = type(part).__name__
    if not isinstance(part, _PARTS + _TABLES) or _KINDS.get(name) is not type(part):
        raise ValueError(f"{name} cannot be described as plain data; use a part of arbordraft's own, without functions")
    if isinstance(part, LearnedDecider):
        return {"class": name, "folder": DECIDER}
    if isinstance(part, Drafter) and any(isinstance(module, OnnxNetwork) for module in part.modules()):
        raise ValueError("a drafter of graphs cannot be described; use the drafter that they were exported from")
    if _is_trained(part):
        trusted = {"arguments": {"same_tokenizer": True}} if getattr(part, "same_tokenizer", False) else {}
        return {"class": name, "trained": True, **trusted}
    if type(part) in _AROUND:
        return {"class": name, "arguments": {other: getattr(part, other) for other in _AROUND[type(part)][1]}}
    if dataclasses.is_dataclass(part):
        given = [field.name for field in dataclasses.fields(part)]
    else:
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        given = [each.name for each in inspect.signature(type(part)).parameters.values() if each.kind in kinds]
    if missing := [argument for argument in given if not hasattr(part, argument)]:
        raise ValueError(f"{name} does not keep the arguments it was made with ({', '.join(missing)})")
    return {"class": name, "arguments": {argument: describe(getattr(part, argument)) for argument in given}}


def rebuild(description: Description, folder: Path) -> Any:
    """Inverts :func:`describe`, for everything but drafters.

    Raises:
        ValueError: if the description is not that of a part of arbordraft.
    """
    if isinstance(description, list):
        return [rebuild(item, folder) for item in description]
    if not isinstance(description, dict):
        return description
    kind = _kind(description, tuple(base for base in _PARTS + _TABLES if base is not Drafter))
    if "folder" in description:
        return LearnedDecider.from_pretrained(folder / DECIDER)
    return _make(kind, {name: rebuild(value, folder) for name, value in description.get("arguments", {}).items()})


def _drafter(description: Description, target: ad.RaggedModel, trained: "str | Path | None") -> Drafter:
    kind, arguments = _kind(description, (Drafter,)), description.get("arguments", {})
    if description.get("trained"):
        if trained is None:
            raise ValueError(f"the weights of the {kind.__name__} are not there")
        drafter: Drafter = kind.from_pretrained(trained, target, **arguments)
        return drafter
    if kind in _AROUND:
        return _make(kind, {_AROUND[kind][0]: target, **arguments})
    if kind is ad.HybridDrafter:
        return _make(kind, {name: _drafter(part, target, trained) for name, part in arguments.items()})
    return _make(kind, arguments)


def _is_trained(part: Any) -> bool:
    """Tells whether a drafter has weights of its own."""
    return isinstance(part, _TRAINED) or getattr(part, "adapter", None) is not None


def _make(kind: Any, arguments: dict[str, Any]) -> Any:
    try:
        return kind(**arguments)
    except TypeError as error:
        raise ValueError(f"{kind.__name__} is not made with {sorted(arguments)}: {error}") from error


def _kind(description: Description, bases: tuple[type, ...]) -> Any:
    """Returns the class that a description names."""
    name = description.get("class") if isinstance(description, dict) else None
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None or not issubclass(kind, bases):
        raise ValueError(f"{name!r} is no {' or '.join(base.__name__ for base in bases)} of arbordraft")
    return kind

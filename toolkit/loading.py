"""Loads models and drafters by name, and builds decoders of both."""

import logging
import os
from typing import TYPE_CHECKING, Any, cast

import torch

from arbordraft.checkpoints.gguf_file import GgufFile, is_gguf
from arbordraft.checkpoints.reader import load_tokenizer
from arbordraft.checkpoints.smollm2 import load_smollm2
from arbordraft.deciders import CostAware, Decider
from arbordraft.deciders.costs import CostTable, StepCosts
from arbordraft.decoding.assemble import as_drafter
from arbordraft.decoding.decoder import SpeculativeDecoder
from arbordraft.decoding.measuring import cost_aware, known_costs
from arbordraft.drafter_names import choose_drafter, drafter_named
from arbordraft.drafters import Drafter, HybridDrafter, NGramDrafter, NoDrafter, TextPool
from arbordraft.kernels import native
from arbordraft.kernels.precision import fast_dtype, warn_if_slow
from arbordraft.kernels.progress import phase
from arbordraft.target.model import RaggedModel
from arbordraft.target.prepacked.gguf import check_kinds
from arbordraft.target.prepacked.room import check_room, needed_memory
from arbordraft.target.sources import Source, read_model, read_tokenizer, source_of
from arbordraft.trees.topology import TreeTopology
from arbordraft.utils.choices import SMALL, Dtype, Kernels
from arbordraft.verifiers.coupling import Coupling

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load(
    model: "str | os.PathLike[str] | PreTrainedModel | RaggedModel" = SMALL,
    drafter: "str | os.PathLike[str] | Drafter | PreTrainedModel | RaggedModel" = "auto",
    *,
    dtype: str | torch.dtype | None = None,
    kernels: str = "auto",
    device: str | torch.device | None = None,
    keep_weights: bool = True,
    weights: str | None = None,
    row_invariant: bool = False,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    revision: str | None = None,
    topology: TreeTopology | None = None,
    coupling: Coupling | None = None,
    decider: Decider | None = None,
    costs: str | StepCosts | CostTable | None = "auto",
    max_cache_tokens: int | None = None,
    generation_config: str = "model",
    pool: TextPool | None = None,
) -> SpeculativeDecoder:
    """Builds a decoder, ready to generate, from a model and a drafter, by name or in memory.

    Args:
        model: a hub name, a folder, a GGUF file, ``smollm2`` for SmolLM2-135M-Instruct, or a model in memory.
        drafter: a drafter in memory or one of these names:

            - ``auto``: a drafter trained for this very target. Else lookups, and after these the target itself with
              fewer bits or a draft model beside it; see :func:`~arbordraft.drafter_names.choose_drafter`.
            - ``ngram``: lookups; ``none``: no drafts.
            - ``self``: the target's own layers with weights of fewer bits. ``self:int4`` and ``self:int8`` choose the
              bits; a GPU has int4.
            - ``mtp``: the layer for multi-token prediction that DeepSeek-V3, GLM-4-MoE, Qwen3.5 and others have.
            - ``early-exit:LAYERS``: the target's own first layers.
            - ``MODULE:CLASS``: your own drafter, a class or function that is called with the target.
            - ``models:/NAME@ALIAS`` or ``models:/NAME/VERSION``: a drafter that a training registered in MLflow.
            - the folder of a trained drafter.
            - folder or hub name of a published head, or of a draft model, which may have another tokenizer.
            - ``retokenized:NAME``: such a draft model, whose text is tokenised anew.
        dtype: dtype of the weights, for models by name: ``float32``, ``bfloat16`` or ``float16``. By default, bfloat16
            on GPUs that support it and CPUs with avx512_bf16 or ARM's bf16, else float32. bfloat16 halves the bytes
            that every step reads. Decoding preserves the law of the model in this precision.
        kernels: see :class:`~arbordraft.RaggedModel`.
        device: device of models by name; by default the GPU if torch sees one, else the CPU.
        keep_weights: see :class:`~arbordraft.RaggedModel`. Where native kernels run, matrices of a folder stay in its
            files in any case. If these have another dtype, the matrices cannot be written to.
        weights: see :class:`~arbordraft.RaggedModel`. Where native kernels run, a GGUF file keeps its own blocks by
            default. Its matrices then stay in the mapped file, which is read as long as the model is used. ``file``
            requires this. ``dense`` dequantises matrices to ``dtype``, and elsewhere this is the default.
        row_invariant: see :class:`~arbordraft.RaggedModel`.
        tokenizer: by default the one that belongs to the model, if there is one.
        revision: revision of a model on the hub.
        topology: the largest tree; by default one that suits the drafter. Every step drafts and verifies the part that
            pays.
        coupling: draft law and verifier of children; by default one that suits the drafter.
        decider: decides how much is drafted; by default :class:`~arbordraft.CostAware` with ``costs``.
        costs: costs of steps, one of these:

            - ``auto``: rough costs at first, then those measured on this machine once measuring pays
              (:func:`~arbordraft.decoding.measuring.cost_aware`). If texts of the coupling depend on drafts, they are
              measured at once.
            - ``renew``: measured now, for as long as it takes.
            - costs that were measured elsewhere.
            - ``None``: drafts whole trees regardless of their costs.
        max_cache_tokens: bound on the rows of each KV cache; unlimited by default.
        generation_config: see :class:`~arbordraft.SpeculativeDecoder`.
        pool: other texts that lookups search, too. Lookups then come before any other drafter.

    Returns:
        The decoder, in eval mode; ``decoder.target`` holds the model and its tokenizer.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if a name is unknown, a file is damaged, an option contradicts a model in memory, or the drafter
            belongs to another target or tokenizer.
        UnsupportedModel: if the model's attention cannot run packed.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=8, hidden_size=8, num_attention_heads=1, num_hidden_layers=1)
        >>> decoder = load(LlamaForCausalLM(config).eval(), "ngram", costs=None)
        >>> decoder.drafter
        NGramDrafter(longest=4, shortest=2)
    """
    if isinstance(costs, str) and costs not in ("auto", "renew"):
        raise ValueError(f"costs must be auto, renew, a CostTable, StepCosts or None, got {costs!r}")
    target_options: dict[str, Any] = {
        "kernels": kernels,
        "keep_weights": keep_weights,
        "weights": weights,
        "row_invariant": row_invariant,
    }
    if isinstance(model, str | os.PathLike):
        target_options["cache_tokens"] = max_cache_tokens
        target = _target_named(os.fspath(model), dtype, device, tokenizer, revision, **target_options)
    else:
        given: dict[str, Any] = {"dtype": dtype, "device": device, "revision": revision}
        if isinstance(model, RaggedModel):
            given |= {
                "kernels": None if kernels == "auto" else kernels,
                "tokenizer": tokenizer,
                "keep_weights": None if keep_weights else False,
                "weights": weights,
                "row_invariant": row_invariant or None,
            }
        if conflicting := [name for name, value in given.items() if value is not None]:
            raise ValueError(f"{', '.join(conflicting)}: the model is in memory already; set this where it is built")
        if isinstance(model, RaggedModel):
            target = model
        else:
            if tokenizer is None and (folder_or_name := getattr(model, "name_or_path", "")):
                tokenizer = load_tokenizer(folder_or_name, local_files_only=True)
            target = RaggedModel(model, tokenizer, **target_options)
    reason = "asked for"
    if drafter == "auto":
        with phase("choosing a drafter"):
            proposer, reason = choose_drafter(target, weighed=decider is not None or costs is not None)
    elif isinstance(drafter, str | os.PathLike):
        with phase(f"preparing the drafter {os.fspath(drafter)}"):
            proposer = drafter_named(os.fspath(drafter), target)
    else:
        proposer = as_drafter(drafter)
    if pool is not None:
        proposer = _with_pool(proposer, pool)
    logging.getLogger("arbordraft").info("drafter: %s (%s)", type(proposer).__name__, reason)
    measured: CostAware | None = None
    if decider is None and costs is not None and not isinstance(proposer, NoDrafter):
        if isinstance(drafter, str) and isinstance(proposer, NGramDrafter):
            proposer = NGramDrafter(longest=8, shortest=1, pool=pool)  # the decider drops drafts that do not pay
        if costs == "auto":
            decider = measured = cost_aware(target, proposer)
        else:
            known = known_costs(target, proposer, renew=True) if isinstance(costs, str) else costs
            decider = CostAware(known, running=isinstance(costs, str))
    options: dict[str, Any] = {"max_cache_tokens": max_cache_tokens, "generation_config": generation_config}
    decoder = SpeculativeDecoder(target, proposer, topology, coupling, decider, **options).eval()
    if measured is not None and not decoder.coupling.verifier.shared:
        measured.settle()  # or the text of a seed would change when costs are measured later
    return decoder


def _with_pool(drafter: Drafter, pool: TextPool) -> Drafter:
    """Returns a drafter whose lookups search a pool."""
    lookups = drafter.first if isinstance(drafter, HybridDrafter) else drafter
    if isinstance(lookups, NGramDrafter):
        lookups.pool = pool
        return drafter
    lookups = NGramDrafter(longest=8, shortest=1, pool=pool)
    return lookups if isinstance(drafter, NoDrafter) else HybridDrafter(lookups, drafter)


def _target_named(
    name: str,
    dtype: str | torch.dtype | None,
    device: str | torch.device | None,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    revision: str | None = None,
    *,
    kernels: str,
    weights: str | None = None,
    cache_tokens: int | None = None,
    **options: Any,
) -> RaggedModel:
    place = _device(device)
    precision = _dtype(dtype, place)
    packs = place.type == "cpu" and kernels in ("auto", "native") and precision in (torch.float32, torch.bfloat16)
    if packs:
        native.load_in_background()
    if weights == "file" and not is_gguf(name):
        raise ValueError(f"weights='file' means the blocks of a GGUF file, and {name} is none: choose int8 or int4")
    # Originals of packed weights are hardly read again, so they are not converted.
    as_stored = (is_gguf(name) or os.path.isdir(name)) and packs and native.problem() is None
    if weights == "file" and not as_stored:
        why = (
            native.problem() if packs else "they run on a CPU, in float32 or bfloat16, with kernels='auto' or 'native'"
        )
        raise ValueError(f"weights='file' needs the native kernels: {why}; weights='dense' does without")
    with phase(f"loading {name}"):  # shown between the parts of it that have lines of their own
        source = source_of(name)
        if as_stored and weights in (None, "file") and isinstance(source, GgufFile):
            check_kinds(source)
        if packs and kernels == "auto" and (isinstance(source, GgufFile) or os.path.isdir(name)):
            check_room(name, needed_memory(source, precision, weights, cache_tokens))
        model, own_tokenizer = _read(source, precision, revision, as_stored=as_stored)
        model.to(place)  # type: ignore[arg-type]
        weights = None if weights == "file" else weights  # the model itself holds the file's blocks
        return RaggedModel(model, tokenizer or own_tokenizer, kernels=kernels, weights=weights, **options)


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError:
        raise ValueError(f"{device!r} is no device of torch; write cpu, cuda or cuda:1") from None
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"{device} is not there: torch sees {torch.cuda.device_count()} GPUs")
    return place


def _dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    if dtype is None:
        return fast_dtype(device)
    if (name := str(dtype).removeprefix("torch.")) not in list(Dtype):
        raise ValueError(f"dtype must be one of {', '.join(Dtype)}, got {dtype!r}")
    chosen = cast(torch.dtype, getattr(torch, name))
    warn_if_slow(chosen, device, "dtype")
    return chosen


def load_model(
    name: str, dtype: torch.dtype, revision: str | None = None, *, as_stored: bool = False
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase | None]":
    """Loads a complete causal LM in eval mode, and its tokenizer, which pads on the left, if it has one.

    Args:
        name: a folder, a hub name, a GGUF file, or ``smollm2`` for SmolLM2-135M-Instruct.
        dtype: dtype of the weights.
        revision: revision of the hub's repository.
        as_stored: leave matrices of a GGUF file or a folder in the file, in its own blocks or dtype. Otherwise all that
            differ from ``dtype`` are converted in memory.

    Raises:
        ImportError: if ``name`` is a GGUF file and the libraries that read it are not installed.
        ValueError: if the model is no causal LM, or is damaged, incomplete or pickled.
    """
    return _read(source_of(name), dtype, revision, as_stored=as_stored)


def _without_bars() -> bool:
    """Returns whether transformers shows no progress bars of its own."""
    from transformers.utils.logging import is_progress_bar_enabled

    return not is_progress_bar_enabled()


def _read(
    source: Source, dtype: torch.dtype, revision: str | None, *, as_stored: bool
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase | None]":
    name = os.fspath(source.path if isinstance(source, GgufFile) else source)
    if revision is not None and (name == SMALL or isinstance(source, GgufFile)):
        why = f"{SMALL} is always the same one" if name == SMALL else f"{name} is a file"
        raise ValueError(f"revision is for models on the hub; {why}")
    if name == SMALL:
        with phase(f"reading {name}", live=False):  # fetching it has bars of its own
            return load_smollm2(dtype)
    place = {} if revision is None else {"revision": revision}
    with phase(f"reading {name}", live=_without_bars() and os.path.exists(name)):
        return read_model(source, dtype, as_stored=as_stored, **place), read_tokenizer(source, **place)


def load_target(
    model: str,
    dtype: Dtype | None = None,
    kernels: Kernels = Kernels.auto,
    weights: str | None = None,
    device: str | None = "cpu",
) -> "tuple[RaggedModel, PreTrainedTokenizerBase]":
    """Loads a model for ragged batches, and its tokenizer; for arguments see :func:`load`.

    Raises:
        ValueError: if the model is damaged, incomplete or no causal LM, or has no tokenizer.
    """
    target = _target_named(model, dtype, device, kernels=kernels, weights=weights)
    return target, tokenizer_of(target, model)


def tokenizer_of(target: RaggedModel, name: object) -> "PreTrainedTokenizerBase":
    """Returns the tokenizer of a target; raises ValueError with the model's name if there is none."""
    if target.tokenizer is None:
        raise ValueError(
            f"{name} has no tokenizer, and prompts are texts: save it beside the model, "
            "tokenizer.save_pretrained(folder)"
        )
    return target.tokenizer

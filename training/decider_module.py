"""Training a decider with Lightning, for a drafter that is trained already.

Shapes: B sequences, L tokens, S slots, R rows, V vocabulary, D draft vocabulary, G drafting steps, M drafts: one for
every token of an answer with which a draft may begin, H hidden size of the drafter, K highest probabilities of a row.
"""

import json
import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn import functional
from torch.optim import AdamW, Optimizer

from arbordraft import (
    CostTable,
    Coupling,
    Decider,
    Fixed,
    FixedDepth,
    LearnedDecider,
    RaggedModel,
    SpeculativeDecoder,
    TreeTopology,
)
from arbordraft.deciders.learned import UNLIKELY
from arbordraft.training.batches import Batch
from arbordraft.training.calibration import auc, drafted_lengths, ece, fit_temperature, tokens_per_second
from arbordraft.training.data import SelfDistillationDataModule
from arbordraft.training.features import TeacherHead
from arbordraft.training.reports import card, speed_figure
from arbordraft.training.shards import ANSWER
from arbordraft.training.students import EagleStudent, Prediction, Student
from arbordraft.verifiers import Matching, TopDown

_ROWS = 256  # rows of logits at a time
_THRESHOLDS = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 2.0)
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class StepCosts:
    """Seconds of the parts of a decoding step of one text.

    Args:
        target: the target's forward by its rows.
        draft: a drafting step.
        decide: asking the decider about it.
        rest: verification and bookkeeping, once per step.
    """

    target: CostTable
    draft: float
    decide: float = 0.0
    rest: float = 0.0

    def seconds(self, steps: int, *, learned: bool) -> list[float]:
        """``[G + 1]`` seconds of a decoding step by its number of drafted tokens, with or without a learned decider."""
        each = self.draft + self.decide * learned
        return [self.rest + self.target(1 + drafted) + drafted * each for drafted in range(steps + 1)]


@dataclass(frozen=True)
class Drafts:
    """Every draft that may begin in the answers of a batch, as long as it keeps to their tokens.

    Args:
        places: ``[G, M, 3]``, see :meth:`arbordraft.LearnedDecider.logits`.
        statistics: ``[G, M, 1 + K]``, likewise.
        hidden: ``[G, M, H]``, likewise; H = 0 if it is not read.
        labels: ``[G, M]`` 1 - TV of target and draft row.
        passes: ``[G, M]`` chance that the text's own token passes, given that those before it did:
            ``min(1, q(x) / p(x))``.
        weights: ``[G, M]`` chance that the draft gets so far, the product of ``passes`` before.
        valid: ``[G, M]`` bool: whether the answer does. All that stands where it does not is meaningless, but
            ``passes`` and ``weights`` are 0.
        sequences: ``[M]`` the sequence of the batch.
    """

    places: Tensor
    statistics: Tensor
    hidden: Tensor
    labels: Tensor
    passes: Tensor
    weights: Tensor
    valid: Tensor
    sequences: Tensor


class DeciderModule(LightningModule):
    """Teaches a decider how much of its rows a drafter can expect to be accepted, on the target's own text.

    The label of a draft row is 1 - TV(target row, draft row), at the temperature of the text: where that is 0 both rows
    are one-hot. A row counts as much as the path above it survives, so all depths are learned as often as decoding
    visits them. Validation calibrates the decider and chooses the threshold that decodes most tokens per second.

    Args:
        drafter: folder of a trained EAGLE head, or a student that has its network. It stays as it is.
        hidden: read the drafter's hidden state.
        top_k: read so many highest probabilities of a row, and its entropy; 0 reads neither.
        widths: of the network's inner layers.
        draft_steps: how deep to follow drafts: the depth of the topology that the decider is meant for.
        lr: learning rate.
        thresholds: to choose from; above 1 nothing is drafted.
        costs: what decoding steps cost; measured on this machine by default.
        measured_tokens: length of each of four answers that are decoded for it.

    Raises:
        ValueError: if an argument is out of range, or the folder holds something else.

    Source: label and calibration from DSpark (arXiv:2607.05147), survival from SpecDec++ (Huang et al., 2024).
    """

    student: Student
    _teacher: TeacherHead
    _target: RaggedModel

    def __init__(
        self,
        drafter: str | Student,
        hidden: bool = True,
        top_k: int = 10,
        widths: Sequence[int] = (64,),
        draft_steps: int = 6,
        lr: float = 1e-3,
        thresholds: Sequence[float] = _THRESHOLDS,
        costs: StepCosts | None = None,
        measured_tokens: int = 48,
    ) -> None:
        super().__init__()
        if draft_steps < 1 or not thresholds or min(thresholds) < 0:
            raise ValueError(
                f"draft_steps must be positive and thresholds not be negative, got {draft_steps} and {list(thresholds)}"
            )
        student = _load(drafter) if isinstance(drafter, str) else drafter
        # Outside of the module's state, like the target's parts below: a checkpoint holds the decider only.
        object.__setattr__(self, "student", student.eval().requires_grad_(False))
        config = student.network.config
        size = getattr(config, "hidden_size", config.target_hidden_size)
        self.decider = LearnedDecider(size if hidden else 0, top_k, widths)
        self.draft_steps, self.lr, self.thresholds = draft_steps, lr, tuple(thresholds)
        self.costs, self.measured_tokens = costs, measured_tokens
        self.speeds: dict[str, list[Any]] = {}
        self._seen: list[dict[str, Tensor]] = []
        self._sequences = 0

    def save(self, folder: Path) -> None:
        """Writes the decider."""
        self.decider.save_pretrained(folder)

    def card(self, metrics: Mapping[str, float]) -> str:
        """The model card."""
        spec, known = self.data.description(), self.data.profile()
        return card("LearnedDecider", spec["model"], spec["fingerprint"], known, metrics)

    def tables(self) -> dict[str, dict[str, list[Any]]]:
        """Speed by threshold and by fixed depth, from the last validation."""
        return {"speeds": self.speeds} if self.speeds else {}

    def figures(self, curve: Sequence[Mapping[str, float]]) -> dict[str, Any]:
        """The same as a picture."""
        return {"speeds": speed_figure(self.speeds)} if self.speeds else {}

    def hidden_layers(self, target: RaggedModel) -> tuple[int, ...]:
        """The target's hidden states that the drafter reads."""
        return tuple(self.student.network.config.hidden_layers or ())

    @property
    def data(self) -> SelfDistillationDataModule:
        """The data module that trains it."""
        return self.trainer.datamodule  # type: ignore[attr-defined]

    def setup(self, stage: str) -> None:
        """Brings the drafter to its target."""
        self.attach(self.data.target)

    def attach(self, target: RaggedModel) -> None:
        """Takes what it needs of the target.

        Raises:
            ValueError: if the drafter was trained for another one.
        """
        self.student.network.check_target(target.model)
        self.student.to(target.device)
        object.__setattr__(self, "_teacher", TeacherHead(target))
        object.__setattr__(self, "_target", target)

    def configure_optimizers(self) -> Optimizer:
        """AdamW."""
        return AdamW(self.decider.parameters(), lr=self.lr)

    def training_step(self, batch: Batch, index: int) -> Tensor:
        """Cross entropy of the chances, weighted by survival."""
        drafts = self.drafts(batch)
        kept = drafts.weights > 0
        logits = self.decider.logits(drafts.places[kept], drafts.statistics[kept], drafts.hidden[kept])
        loss = _cross_entropy(logits, drafts.labels[kept], drafts.weights[kept])
        self.log("train/bce", loss, prog_bar=True, batch_size=1)
        return loss

    def on_validation_epoch_start(self) -> None:
        """Forgets the last validation."""
        self._seen, self._sequences = [], 0

    def validation_step(self, batch: Batch, index: int) -> None:
        """Collects logits along held-out text; every second sequence calibrates, the others judge."""
        drafts = self.drafts(batch)
        rows = (values.flatten(0, 1) for values in (drafts.places, drafts.statistics, drafts.hidden))
        found = {name: getattr(drafts, name) for name in ("labels", "passes", "weights", "valid")}
        found["logits"] = self.decider.logits(*rows).float().view_as(drafts.labels)
        found["judges"] = ((self._sequences + drafts.sequences) % 2 == 1).expand_as(drafts.labels)
        self._seen.append({name: values.cpu() for name, values in found.items()})
        self._sequences += len(batch.tokens)

    def on_validation_epoch_end(self) -> None:
        """Calibrates the decider, chooses its threshold, and reports both on text that neither has seen.

        Raises:
            ValueError: if too little text is held out.
        """
        if self.trainer.sanity_checking:
            return
        seen = {name: torch.cat([part[name] for part in self._seen], dim=1) for name in self._seen[0]}
        judges, complete = seen["judges"][0], seen["valid"].all(dim=0)
        if not (complete & judges).any() or not (complete & ~judges).any():
            raise ValueError(
                f"no two held-out answers are as long as {self.draft_steps} drafting steps, one to calibrate and one to "
                "judge; raise data.validation, or lower model.draft_steps"
            )
        parts = [{name: values[:, half] for name, values in seen.items()} for half in (~judges, judges)]
        self.decider.temperatures = tuple(
            fit_temperature(*(parts[0][name][step] for name in ("logits", "labels", "weights")))
            for step in range(self.draft_steps)
        )
        metrics = self._honesty(parts[1]) | self._choose(*parts)
        self.log_dict({f"val/{name}": value for name, value in metrics.items()}, rank_zero_only=False, sync_dist=False)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds what calibration found."""
        checkpoint["calibration"] = self.decider.temperatures, self.decider.threshold

    def on_load_checkpoint(self, checkpoint: Mapping[str, Any]) -> None:
        """Takes it back."""
        self.decider.temperatures, self.decider.threshold = checkpoint["calibration"]

    @torch.no_grad()
    def drafts(self, batch: Batch) -> Drafts:
        """What the drafter does with a batch, in the form in which decoding shows it to the decider."""
        steps = min(self.draft_steps, batch.tokens.shape[1] - 2)
        predictions = list(self.student.unroll(batch, self._target, steps))
        rows = torch.stack([_earlier(found, step) for step, found in enumerate(self._rows(batch, predictions))])
        sequences, first = rows[0, ..., 0].nonzero(as_tuple=True)
        real, labels, passes, own = rows[:, sequences, first, :4].unbind(-1)
        valid = real.cumprod(dim=0)
        depths = torch.arange(len(rows), device=rows.device)[:, None].expand_as(valid)
        greedy = (batch.temperatures[sequences] == 0).expand_as(valid)
        hidden = rows.new_zeros(*valid.shape, self.decider.hidden_size)
        if self.decider.hidden_size:
            for step, prediction in enumerate(predictions):
                slots = (first + step - prediction.ahead).clamp(max=prediction.hidden.shape[1] - 1)
                hidden[step] = prediction.hidden[sequences, slots].float()
        return Drafts(
            places=torch.stack([depths, _before(own.clamp(min=UNLIKELY).log(), 0.0).cumsum(dim=0), greedy], dim=-1),
            statistics=rows[:, sequences, first, 4:],
            hidden=hidden,
            labels=labels,
            passes=passes * valid,
            weights=_before(passes, 1.0).cumprod(dim=0) * valid,
            valid=valid.bool(),
            sequences=sequences,
        )

    def _rows(self, batch: Batch, predictions: Sequence[Prediction]) -> Tensor:
        """``[G, B, L, 5 + K]`` of the rows that predict the tokens of answers, by token.

        The last axis holds 1 if there is such a row, its label, how likely the token passes, the token's draft
        probability, and the row's entropy and highest probabilities.
        """
        count, length = batch.tokens.shape
        tokens, top = self.student.network.tokens, self.decider.top_k
        index = tokens.new_full((self.student.network.config.vocab_size,), -1)
        index[tokens] = torch.arange(len(tokens), device=tokens.device)
        found = torch.zeros(self.draft_steps, count * length, 5 + top, device=tokens.device)
        for part in (batch.roles == ANSWER).flatten().nonzero()[:, 0].split(_ROWS):
            sequences, at = part // length, part % length
            text = batch.tokens[sequences, at]
            greedy = batch.temperatures[sequences] == 0
            heat = batch.temperatures[sequences].masked_fill(greedy, 1.0)[:, None]
            target = (self._teacher(batch.final[sequences, at - 1]).float() / heat).log_softmax(dim=-1)
            likely, target = target.gather(1, text[:, None])[:, 0].exp(), target[:, tokens].exp()
            for step, prediction in enumerate(predictions):
                slots = at - prediction.ahead
                hidden = prediction.hidden[sequences, slots.clamp(min=0)].to(prediction.head.dtype)
                draft = (functional.linear(hidden, prediction.head, prediction.bias).float() / heat).softmax(dim=-1)
                known = index[text]
                own = draft.gather(1, known.clamp(min=0)[:, None])[:, 0] * (known >= 0)
                matches = (draft.argmax(dim=-1) == known).float()
                label = torch.where(greedy, matches, torch.minimum(target, draft).sum(dim=-1).clamp(max=1))
                passes = torch.where(greedy, matches, (own / likely.clamp(min=_TINY)).clamp(max=1))
                best = draft.topk(min(top, draft.shape[-1])).values
                entropy = torch.special.entr(draft).sum(dim=-1)
                row = torch.cat(
                    [torch.stack([torch.ones_like(own), label, passes, own, entropy], dim=-1), best], dim=-1
                )
                found[step, part, : row.shape[-1]] = row * (slots >= prediction.first)[:, None]
        return found.view(self.draft_steps, count, length, -1)

    def _honesty(self, part: Mapping[str, Tensor]) -> dict[str, float]:
        """How good the chances are, over all depths and at each."""
        labels, weights, chances = part["labels"], part["weights"], self._chances(part)
        kept = weights > 0
        everywhere = chances[kept], labels[kept], weights[kept]
        metrics = {
            "bce": float(_cross_entropy(torch.logit(everywhere[0], 1e-7), *everywhere[1:])),
            "ece": ece(*everywhere),
            "ece_uncalibrated": ece(part["logits"][kept].sigmoid(), *everywhere[1:]),
            "auc": auc(*everywhere),
        }
        for step in range(self.draft_steps):
            there = chances[step][kept[step]], labels[step][kept[step]], weights[step][kept[step]]
            metrics[f"bce_pos_{step + 1}"] = float(_cross_entropy(torch.logit(there[0], 1e-7), *there[1:]))
            metrics[f"ece_pos_{step + 1}"] = ece(*there)
            metrics[f"auc_pos_{step + 1}"] = auc(*there)
        return {name: value for name, value in metrics.items() if math.isfinite(value)}

    def _choose(self, fit: Mapping[str, Tensor], judge: Mapping[str, Tensor]) -> dict[str, float]:
        """Chooses the threshold by speed on one part; speeds are those on the other one."""
        if self.costs is None:
            measured = self._measure() if self.trainer.is_global_zero else None
            self.costs = self.trainer.strategy.broadcast(measured)
        learned = self.costs.seconds(self.draft_steps, learned=True)
        fixed = self.costs.seconds(self.draft_steps, learned=False)
        depths = range(self.draft_steps + 1)

        def speeds(part: Mapping[str, Tensor]) -> tuple[list[float], list[float]]:
            complete = part["valid"].all(dim=0)
            chances, passes = self._chances(part)[:, complete], part["passes"][:, complete]
            return (
                [tokens_per_second(drafted_lengths(chances, at), passes, learned) for at in self.thresholds],
                [tokens_per_second(torch.full_like(passes[0], at).long(), passes, fixed) for at in depths],
            )

        by_threshold, by_depth = speeds(fit)
        best = max(range(len(by_threshold)), key=by_threshold.__getitem__)
        depth = max(depths, key=by_depth.__getitem__)
        self.decider.threshold = self.thresholds[best]
        by_threshold, by_depth = speeds(judge)
        self.speeds = {
            "decider": ["learned"] * len(by_threshold) + ["fixed"] * len(by_depth),
            "at": [*self.thresholds, *depths],
            "tokens_per_second": [*by_threshold, *by_depth],
        }
        return {
            **{f"tokens_per_second@{at:g}": speed for at, speed in zip(self.thresholds, by_threshold, strict=True)},
            "tokens_per_second": by_threshold[best],
            "threshold": self.thresholds[best],
            "tokens_per_second_fixed": by_depth[depth],
            "fixed_depth": depth,
        }

    def _chances(self, part: Mapping[str, Tensor]) -> Tensor:
        """``[G, M]``."""
        return (part["logits"] / torch.tensor(self.decider.temperatures)[:, None]).sigmoid()

    def _measure(self) -> StepCosts:
        """Decodes some held-out prompts with and without the decider, which never stops here."""
        target, coupling = self.data.target, Coupling(Fixed(1), TopDown(Matching()))
        drafter, topology = self.student.drafter(target), TreeTopology.chain(self.draft_steps)
        tireless = deepcopy(self.decider)
        tireless.threshold = 0.0
        prompts = self.data.held_out_prompts(4)

        def decode(decider: Decider) -> tuple[float, float]:
            decoder, draft, rest = SpeculativeDecoder(target, drafter, topology, coupling, decider), [], []
            for prompt in prompts:
                stats = decoder.generate(
                    torch.tensor([prompt]),
                    max_new_tokens=self.measured_tokens,
                    do_sample=False,
                    eos_token_id=None,
                    return_dict_in_generate=True,
                ).stats  # type: ignore[union-attr]
                draft.append(stats.seconds["draft"] / max(1, stats.drafted))
                rest.append((stats.seconds["verify"] + stats.seconds["commit"]) / stats.forwards[0])
            return min(draft), min(rest)  # the best, which noise disturbs least

        decode(FixedDepth())  # warms up
        draft, rest = decode(FixedDepth())
        decide = max(0.0, decode(tireless)[0] - draft)
        return StepCosts(CostTable.measure(target, range(1, self.draft_steps + 2)), draft, decide, rest)


def _load(folder: str) -> Student:
    from arbordraft.heads.eagle import EagleConfig, EagleHead

    try:
        kind = json.loads(Path(folder, "config.json").read_text()).get("model_type")
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} holds no trained drafter: its config.json cannot be read ({error})") from error
    if kind != EagleConfig.model_type:
        raise ValueError(f"{folder} holds a {kind}; a folder must hold an EAGLE head, hand others over as students")
    student = EagleStudent()
    student.network = EagleHead.from_pretrained(folder).float()
    return student


def _cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean; 0 if there is nothing."""
    losses = functional.binary_cross_entropy_with_logits(logits.float(), labels, reduction="none")
    return (losses * weights).sum() / weights.sum().clamp(min=_TINY)


def _earlier(x: Tensor, by: int) -> Tensor:
    """``[B, L, C]``: place j holds what j + by had."""
    return functional.pad(x[:, by:], (0, 0, 0, min(by, x.shape[1])))


def _before(x: Tensor, start: float) -> Tensor:
    """``[G, M]``: step s holds what s - 1 had."""
    return torch.cat([torch.full_like(x[:1], start), x[:-1]])


__all__ = ["DeciderModule", "Drafts", "StepCosts"]

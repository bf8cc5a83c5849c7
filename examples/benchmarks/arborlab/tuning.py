"""Finds the fastest way of speculating for a target and a drafter, on this machine and with given prompts.

Tuning measures costs, then lets settings compete: all decode some prompts in turns, the slower half drops out, and the
rest decode more. By these costs every setting drafts only as far as it pays. The competition chooses the drafter and
the size of the tree.

Shapes: B samples.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

from arbordraft.bench.decoding import take_turns, warm_up
from arbordraft.bench.tuned import Choice, Setting, Tuned
from arbordraft.bench.workload import Workload
from arbordraft.decoding.decoder import SpeculativeDecoder
from arbordraft.decoding.measuring import measure_costs
from arbordraft.decoding.prompts import chat_batches
from arbordraft.drafters import Drafter, NGramDrafter
from arbordraft.target.model import RaggedModel
from arbordraft.utils.checks import check_int, check_sequence, check_temperature

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PLAIN = Setting("plain")
_TREES = (8, 16, 32)
_LARGEST = 4096  # largest batch size to tune for


def tune(
    target: RaggedModel,
    tokenizer: "PreTrainedTokenizerBase",
    name: str,
    drafter: Drafter,
    prompts: Sequence[str],
    *,
    batches: Sequence[int] = (1, 8),
    temperature: float = 0.0,
    new_tokens: int = 96,
    on_progress: Callable[[str], None] = lambda what: None,
) -> Tuned:
    """Measures costs and chooses the fastest setting for every batch size.

    Args:
        name: name of the drafter.
        prompts: first user turns like those to decode later; at least one.
        batches: batch sizes to choose for, 1 to 4096.
        temperature: 0 for greedy.
        new_tokens: most tokens of an answer, 1 or more.

    Raises:
        TypeError: if a number is of the wrong type, or ``prompts`` is not a list of texts.
        ValueError: if an argument is out of range, or there is no prompt or batch size.
    """
    batches = check_sequence("batches", batches, lambda name, value: check_int(name, value, 1, _LARGEST))
    if not batches:
        raise ValueError("batches must hold at least one batch size, got none")
    temperature, new_tokens = check_temperature("temperature", temperature), check_int("new_tokens", new_tokens, 1)
    on_progress("measuring forwards and drafts")
    costs = measure_costs(target, drafter, tokenizer, prompts)
    choices = []
    for batch in sorted(set(batches)):
        decoders = {each: each.decoder(target, drafter, costs, batch) for each in grid(drafter)}
        inputs = chat_batches(tokenizer, list(islice(cycle(prompts), max(batch, len(prompts)))), batch)
        choices.append(_eliminate(batch, decoders, inputs, temperature, new_tokens, on_progress))
    return Tuned(name, temperature, costs, choices)


def grid(drafter: Drafter) -> list[Setting]:
    """Returns all settings that tuning tries for a drafter."""
    settings = [_PLAIN, Setting("lookup")]
    if isinstance(drafter, NGramDrafter):
        return settings
    return settings + [Setting(kind, nodes) for kind in ("tree", "lookup or tree") for nodes in _TREES]


def _eliminate(
    batch: int,
    decoders: Mapping[Setting, SpeculativeDecoder],
    batches: Sequence[dict[str, Any]],
    temperature: float,
    new_tokens: int,
    on_progress: Callable[[str], None],
) -> Choice:
    """Chooses a setting by successive halving; plain decoding stays to the end as the reference."""
    workload = Workload(batch=batch, new_tokens=new_tokens, temperature=temperature, repeats=1)
    warm_up(decoders, batches[0], workload)
    left, speeds = list(decoders), dict[Setting, float]()

    def show_case(setting: str, done: int, of: int) -> None:
        on_progress(f"batch {batch}: {len(left)} settings left, decoding with {setting}")

    for more in reversed(range(max(1, (len(left) - 1).bit_length()))):
        counts, seconds = dict.fromkeys(left, 0), dict.fromkeys(left, 0.0)
        # Early rounds decode fewer prompts, not shorter answers: lookups need some text to find anything.
        some = batches[: max(2, len(batches) >> more)]
        for setting, spent, stats in take_turns({key: decoders[key] for key in left}, some, workload, show_case):
            seconds[setting] += spent
            counts[setting] += sum(stats.emitted)
        speeds |= {setting: counts[setting] / seconds[setting] for setting in left}
        left.sort(key=speeds.__getitem__, reverse=True)
        best = left[0]
        kept = left[: max(2, (len(left) + 1) // 2)]
        left = kept if _PLAIN in kept else [*kept, _PLAIN]
    rivals = {str(setting): speeds[setting] for setting in sorted(speeds, key=speeds.__getitem__, reverse=True)}
    return Choice(batch, best, speeds[best], speeds[_PLAIN], rivals)

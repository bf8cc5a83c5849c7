"""Measures the cost of grammars and the gain of forced tokens and lookups, on texts turned into JSON by schemas.

Shapes: B samples, V vocabulary.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from arbordraft import builders
from arbordraft.bench.decoding import Decode, DecodeRow, emitted
from arbordraft.bench.report import Report
from arbordraft.bench.workload import Workload
from arbordraft.cli.options import (
    AutoDtypeOption,
    BatchesOption,
    JsonOption,
    LimitOption,
    ModelOption,
    NewTokensOption,
    PngOption,
    RepeatsOption,
    SeedOption,
    TemperaturesOption,
    workloads,
)
from arbordraft.cli.program import run_script
from arbordraft.decoding.decoder import SpeculativeDecoder
from arbordraft.decoding.metrics import DecodeStats
from arbordraft.grammars import Grammar, GrammarCompiler
from arbordraft.target.model import RaggedModel

if TYPE_CHECKING:
    from arbordraft.grammars.compiler import GrammarState

_TEXT = {"type": "string", "minLength": 1, "maxLength": 60}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _list(items: Mapping[str, Any], most: int, least: int = 1) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def _number(most: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": 0, "maximum": most}


# Short texts, each with a schema of its facts: nested objects, lists, numbers, choices, patterns.
TASKS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    (
        "Ana Sousa, 34, works as a nurse in Porto. Write to ana@clinic.com or call 555-0134.",
        _object(
            name=_TEXT,
            age=_number(120),
            job=_TEXT,
            city=_TEXT,
            contact=_object(
                email={"type": "string", "pattern": "^[a-z]+@[a-z]+\\.com$"},
                phone={"type": "string", "pattern": "^[0-9]{3}-[0-9]{4}$"},
            ),
        ),
    ),
    (
        "Order 4711 of 2031-05-09: two oak shelves at 49.50 each and one brass lamp at 19.90. Paid by card.",
        _object(
            order_number=_number(99999),
            order_date={"type": "string", "format": "date"},
            items=_list(_object(product=_TEXT, quantity=_number(99), unit_price={"type": "number"}), 2),
            payment_method={"enum": ["card", "cash", "invoice"]},
        ),
    ),
    (
        "The north station measured 19.5 degrees at nine and 23 at noon; clear sky, wind 4 m/s from the west.",
        _object(
            station=_TEXT,
            measurements=_list(_object(time_of_day=_TEXT, temperature_celsius={"type": "number"}), 2),
            wind=_object(metres_per_second=_number(60), direction={"enum": ["north", "east", "south", "west"]}),
            sky={"enum": ["clear", "cloudy", "overcast"]},
        ),
    ),
    (
        "I love this kettle, it boils fast and looks great, but the lid is loose. Four stars from me, Jörg.",
        _object(
            reviewer=_TEXT,
            stars={"type": "integer", "minimum": 1, "maximum": 5},
            sentiment={"enum": ["positive", "neutral", "negative"]},
            advantages=_list(_TEXT, 3),
            disadvantages=_list(_TEXT, 3),
            would_buy_again={"type": "boolean"},
        ),
    ),
    (
        "Book a table for six on Friday at 19:30 near the window, please; one of us is allergic to nuts. Chen",
        _object(
            function={"const": "reserve_table"},
            arguments=_object(
                guest_name=_TEXT,
                number_of_guests=_number(20),
                weekday={"enum": ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]},
                time={"type": "string", "pattern": "^[0-2][0-9]:[0-5][0-9]$"},
                allergies=_list({"enum": ["nuts", "gluten", "milk", "eggs", "fish"]}, 3, 0),
                special_request={"anyOf": [_TEXT, {"type": "null"}]},
            ),
        ),
    ),
    (
        "GET /index.html took 35 ms and returned 200 for 192.168.0.7; POST /login took 120 ms and returned 401.",
        _object(
            requests=_list(
                _object(
                    method={"enum": ["GET", "POST", "PUT", "DELETE"]},
                    path=_TEXT,
                    status_code=_number(599),
                    duration_milliseconds=_number(9999),
                ),
                2,
                2,
            )
        ),
    ),
    (
        "Lisbon is the capital of Portugal and has about 550000 people; Porto lies on the Douro and has 230000.",
        _object(
            country=_TEXT,
            cities=_list(
                _object(city_name=_TEXT, population=_number(50_000_000), is_capital={"type": "boolean"}), 2, 2
            ),
        ),
    ),
    (
        "Mix 200 g of flour with two eggs and a pinch of salt, rest for 20 minutes, then fry in butter. Serves four.",
        _object(
            recipe_title=_TEXT,
            servings=_number(12),
            ingredients=_list(_object(ingredient=_TEXT, amount=_TEXT), 4, 2),
            resting_minutes=_number(240),
            steps=_list(_TEXT, 4, 2),
        ),
    ),
)


@dataclass(frozen=True)
class MaskRow:
    """Time of the grammars alone within masked plain decoding.

    Args:
        microseconds: time per token to advance the grammar, find the allowed tokens and mask the scores.
        share: share of the time of a step.
    """

    dtype: str
    batch: int
    temperature: float
    tokens: int
    microseconds: float
    share: float


class _Mask:
    """Logits processor of transformers with the same grammar engine."""

    def __init__(self, states: list["GrammarState"], ends: frozenset[int]) -> None:
        self._states, self._ends, self._first = states, ends, True

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        masked = scores.clone()
        for state, last, row in zip(self._states, input_ids[:, -1].tolist(), masked, strict=True):
            if not self._first:
                if last in self._ends:
                    continue
                state.accept(last)
            state(row)
        self._first = False
        return masked


class GrammarSuite:
    """Turns texts into JSON with several decoders, the first of them masked plain decoding.

    Args:
        target: the model.
        limit: use only this many tasks.
    """

    def __init__(self, target: RaggedModel, limit: int | None = None) -> None:
        self.target = target
        tasks = TASKS[:limit]
        self.prompts = tuple(f"Extract the facts as JSON.\n\n{text}" for text, _ in tasks)
        self._grammars = [Grammar.json_schema(schema) for _, schema in tasks]
        ends: Any = target.model.generation_config.eos_token_id
        self._ends = frozenset(ends if isinstance(ends, list) else [ends])
        self._compiler = GrammarCompiler(target.tokenizer, target.vocab_size)
        self._grammar_of: dict[tuple[int, ...], Grammar] = {}

    def decoders(self, workload: Workload) -> dict[str, Decode | SpeculativeDecoder]:
        """Builds masked plain decoding, forced tokens with lookups, and transformers' ``generate``."""
        alone = Workload(self.prompts, batch=1).batches(self.target)
        self._grammar_of = {
            tuple(inputs["input_ids"][0].tolist()): grammar
            for inputs, grammar in zip(alone, self._grammars, strict=True)
        }
        fast = builders.lookup(self.target, expected_batch=workload.batch)
        return {
            "masked plain": self._ours(builders.plain(self.target)),
            "forced tokens and lookups": self._ours(fast),
            "transformers generate": self._theirs,
        }

    def masks(self, workload: Workload, row: DecodeRow) -> MaskRow:
        """Measures the cost of masks by replaying the answers of masked plain decoding without a model."""
        decoder = builders.plain(self.target)
        seconds, tokens = 0.0, 0
        for inputs in workload.batches(self.target):
            output = self._decoded(decoder, inputs, workload)
            columns = inputs["input_ids"].shape[1]
            scores = torch.zeros(self.target.vocab_size)
            for grammar, text, count in zip(
                self._grammars_of(inputs), output.sequences[:, columns:].tolist(), output.stats.emitted, strict=True
            ):
                place = self._compiler(grammar, sorted(self._ends)).fork()
                start = time.perf_counter()
                for token in text[:count]:
                    place(scores)
                    place = place.fork()
                    place.accept(token)
                seconds += time.perf_counter() - start
                tokens += count
        each = seconds / tokens
        share = each * row.tokens_per_second
        return MaskRow(row.dtype, row.batch, row.temperature, tokens, 1e6 * each, share)

    def _grammars_of(self, inputs: dict[str, Any]) -> list[Grammar]:
        rows = zip(inputs["input_ids"], inputs["attention_mask"].bool(), strict=True)
        return [self._grammar_of[tuple(row[mask].tolist())] for row, mask in rows]

    def _decoded(self, decoder: SpeculativeDecoder, inputs: dict[str, Any], workload: Workload) -> Any:
        return decoder.generate(
            **inputs,
            **workload.request(),
            seeds=workload.seeds(len(inputs["input_ids"])),
            grammar=self._grammars_of(inputs),
            return_dict_in_generate=True,
        )

    def _ours(self, decoder: SpeculativeDecoder) -> Decode:
        def decode(inputs: dict[str, Any], workload: Workload) -> DecodeStats:
            return self._decoded(decoder, inputs, workload).stats

        return decode

    def _theirs(self, inputs: dict[str, Any], workload: Workload) -> DecodeStats:
        torch.manual_seed(workload.seed)
        ends = sorted(self._ends)
        states = [self._compiler(grammar, ends).fork() for grammar in self._grammars_of(inputs)]
        model: Any = self.target.model
        texts = model.generate(**inputs, **workload.request(), logits_processor=[_Mask(states, self._ends)])
        return DecodeStats("exact", emitted=[emitted(texts[:, inputs["input_ids"].shape[1] :], model)], forwards=[])


def main(
    model: ModelOption = "smollm2",
    dtype: AutoDtypeOption = None,
    limit: LimitOption = None,
    new_tokens: NewTokensOption = 160,
    batches: BatchesOption = "1,8",
    temperatures: TemperaturesOption = "0",
    repeats: RepeatsOption = 3,
    seed: SeedOption = 0,
    json: JsonOption = None,
    png: PngOption = None,
) -> None:
    """Measure texts turned into JSON by schemas: masked plain decoding, forced tokens with lookups, transformers."""
    with Report(json, png) as report:
        suite = GrammarSuite(report.load(model, dtype), limit)
        for each in workloads(None, None, batches, temperatures, new_tokens=new_tokens, repeats=repeats, seed=seed):
            workload = replace(each, prompts=suite.prompts)
            rows = report.decode(suite.target, suite.decoders(workload), workload)
            report.take([suite.masks(workload, rows[0])], workload)


if __name__ == "__main__":
    run_script(main)

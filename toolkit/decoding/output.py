"""Output of ``generate(return_dict_in_generate=True)``."""

from dataclasses import dataclass

from transformers.generation.utils import GenerateDecoderOnlyOutput

from arbordraft.decoding.metrics import AnswerStats, DecodeStats


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """Hugging Face's generation output with the statistics of speculative decoding.

    Args:
        sequences: ``[B, L + new]`` token ids.
        stats: counts and times of the run.
        answers: counts and times of each sample.
    """

    stats: DecodeStats | None = None
    answers: list[AnswerStats] | None = None

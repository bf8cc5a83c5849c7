"""Takes a chat template apart into the texts around messages, so that a model can write any message itself."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARKS = "first-mark-4711", "second-mark-4712", "third-mark-4713"  # texts that no template contains


class ChatFormat:
    """The texts that a chat template puts around messages of user and assistant.

    ``to_user`` stands between an answer and the next user turn, ``to_assistant`` between a user turn and its answer.

    Args:
        tokenizer: the target's tokenizer, with a chat template.

    Raises:
        ValueError: if there is no template, or it does not repeat messages word by word.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        if not tokenizer.chat_template:
            raise ValueError(
                "the target's tokenizer has no chat template, so nothing tells which tokens are the assistant's: name "
                "a file with one (--data.target.chat_template), or take the instruction-tuned version of the model"
            )
        self.tokenizer = tokenizer
        _, _, self.to_user, self.to_assistant = self._parts("user", "assistant", "user")
        added = tokenizer.added_tokens_decoder.items()
        self.special = frozenset({*tokenizer.all_special_ids, *(token for token, form in added if form.special)})

    def before_user(self, system: str | None = None) -> str:
        """Returns the text before the first user turn; by default with the template's own system message.

        Raises:
            ValueError: if the template takes no system message.
        """
        if system is None:
            return self._parts("user")[0]
        try:
            before, between, _ = self._parts("system", "user")
        except Exception as error:  # templates raise errors of any class
            raise ValueError(f"the chat template takes no system message ({error}); leave them out") from error
        return before + system + between

    def ids(self, text: str) -> list[int]:
        """Tokenises the beginning of a conversation; special tokens appear only where the text spells them out."""
        return _ids(self.tokenizer, text)

    def ids_after(self, text: str) -> list[int]:
        return ids_after(self.tokenizer, text)

    def text(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens)))

    def _parts(self, *roles: str) -> list[str]:
        marks = _MARKS[: len(roles)]
        messages = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
        rest = str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        parts = []
        for mark in marks:
            part, separator, rest = rest.partition(mark)
            if not separator:
                raise ValueError(f"the chat template does not repeat messages word by word: {mark!r} is gone")
            parts.append(part)
        return [*parts, rest]


def ids_after(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """Tokenises a text that continues another, without the space that many tokenizers add at the beginning."""
    start, whole = _ids(tokenizer, "a"), _ids(tokenizer, "a" + text)
    return whole[len(start) :] if whole[: len(start)] == start else _ids(tokenizer, text)


def _ids(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]

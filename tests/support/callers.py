"""Tiny models whose chat templates write tool calls in common formats."""

from collections.abc import Sequence
from copy import deepcopy

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from arbordraft import LanguageModelDrafter, NGramDrafter, RaggedModel, SpeculativeDecoder, TreeTopology
from arbordraft.drafters import HybridDrafter
from arbordraft.grammars import Grammar, GrammarCompiler
from support.models import EOS, ragged, tiny
from support.served import POSITIONS
from support.spellers import speller_tokenizer

_TURNS = (
    "{% if tools %}{{ '[tools ' + tools | tojson + ']' }}{% endif %}"
    "{% for said in messages %}{{ said.role + ': ' }}{% if said.role == 'tool' %}{{ said.name + '=' }}{% endif %}"
)
_NEXT = "{{ '<eos>' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"

# Like Hermes, Qwen and many others.
TAGGED = (
    f"{_TURNS}{{{{ said.content }}}}{{% for call in said.tool_calls or [] %}}"
    "{% if said.content or not loop.first %}{{ '\n' }}{% endif %}"
    '{{ \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    f"{{{{ call.function.arguments | tojson }}}}{{{{ '}}\n</tool_call>' }}}}{{% endfor %}}{_NEXT}"
)
# Like Llama 3: one call, without words and without marks.
BARE = (
    f"{_TURNS}{{% if 'tool_calls' in said %}}{{% if said.tool_calls | length > 1 %}}"
    "{{ raise_exception('one call at a time') }}{% endif %}{% set call = said.tool_calls[0].function %}"
    "{{ '{\"name\": \"' + call.name + '\", \"parameters\": ' }}{{ call.arguments | tojson }}{{ '}' }}"
    f"{{% else %}}{{{{ said.content }}}}{{% endif %}}{_NEXT}"
)
# Like Mistral: a list of calls with their ids, which must have nine letters.
LISTED = (
    f"{_TURNS}{{% if 'tool_calls' in said %}}{{{{ '[TOOL_CALLS][' }}}}{{% for call in said.tool_calls %}}"
    "{% if call.id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}"
    "{% if not loop.first %}{{ ', ' }}{% endif %}{{ (call.function | tojson)[:-1] }}"
    "{{ ', \"id\": \"' + call.id + '\"}' }}{% endfor %}{{ ']' }}"
    f"{{% else %}}{{{{ said.content }}}}{{% endif %}}{_NEXT}"
)
# Like DeepSeek: special tokens around all parts, and arguments that must be given as text.
TOKENS = (
    f"{_TURNS}{{{{ said.content }}}}{{% if said.tool_calls %}}{{{{ '<calls>' }}}}{{% for call in said.tool_calls %}}"
    "{{ '<call>' + call.function.name + '<sep>' + call.function.arguments + '</call>' }}"
    f"{{% endfor %}}{{{{ '</calls>' }}}}{{% endif %}}{_NEXT}"
)
TEMPLATES = {"tagged": TAGGED, "bare": BARE, "listed": LISTED, "tokens": TOKENS}
# Marks that are tokens; models differ in whether these are special.
MARKS = {
    "tagged": ["<tool_call>", "</tool_call>"],
    "bare": [],
    "listed": ["[TOOL_CALLS]"],
    "tokens": ["<calls>", "<call>", "<sep>", "</call>", "</calls>"],
}


def caller_tokenizer(template: str, marks: Sequence[str] = (), *, special: bool = True) -> PreTrainedTokenizerFast:
    """Returns a tokenizer that writes any text, and each of some marks as one token."""
    tokenizer = deepcopy(speller_tokenizer())
    tokenizer.add_tokens([AddedToken(mark, special=special, normalized=False) for mark in ["<think>", *marks]])
    tokenizer.chat_template = template
    assert tokenizer.eos_token_id == EOS
    return tokenizer


def follows(tokenizer: PreTrainedTokenizerFast, grammar: str, texts: Sequence[str]) -> bool:
    """Returns whether a grammar accepts texts, each tokenised on its own, as a whole answer."""
    state = GrammarCompiler(tokenizer, len(tokenizer))(Grammar.lark(grammar), [EOS]).fork()
    tokens = [token for text in texts for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
    for token in [*tokens, EOS]:
        allowed = state.allowed()
        if allowed is None or token not in allowed:
            return False
        state.accept(token)
    return True


def caller(style: str = "tagged", **options: object) -> SpeculativeDecoder:
    """Returns a random model with one of the templates, and a drafter that is sometimes right."""
    return speaker(caller_tokenizer(TEMPLATES[style], MARKS[style]), **options)


def speaker(tokenizer: PreTrainedTokenizerFast, **options: object) -> SpeculativeDecoder:
    """Returns the decoder of :func:`caller` with any tokenizer."""
    settings = {"vocab_size": len(tokenizer), "max_position_embeddings": 4 * POSITIONS, "sharpness": 3.0}
    target = RaggedModel(tiny(**settings), tokenizer, kernels="torch", self_test=False)
    draft = ragged(seed=3, **settings)
    drafter = HybridDrafter(NGramDrafter(), LanguageModelDrafter(draft))
    return SpeculativeDecoder(target, drafter, TreeTopology.from_k_config((2, 2, 1)), **options)

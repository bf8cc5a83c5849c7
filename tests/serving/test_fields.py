"""The addresses take the same fields; every difference has a reason."""

from dataclasses import fields
from pathlib import Path

import pytest

from arbordraft.decoding.requests import Request
from arbordraft.serving.chats import ChatRequest
from arbordraft.serving.completions import CompletionRequest
from arbordraft.serving.fields import REQUEST_HINTS
from arbordraft.serving.responses import ResponsesRequest

TEMPLATE = "the chat template has it, and completions use none"
CALLS = "the chat template writes calls, and completions use none"
NAME = "OpenAI's name for"
ITEMS = "the items of a response have no place for it"
STREAMS = "events of a response always end with the usage"
# Fields that only one of two has, and fields that both have with other types, ranges or defaults.
CHATS_AND_COMPLETIONS = {
    "messages": f"{NAME} the prompt of a chat",
    "prompt": f"{NAME} the prompt of a completion",
    "max_completion_tokens": f"{NAME} max_tokens in chats only",
    "max_tokens": "OpenAI's default of completions is 16; with echo, completions of 0 tokens score a prompt",
    "logprobs": "OpenAI's type is a number in completions, and a switch beside top_logprobs in chats",
    "top_logprobs": "completions give the number in logprobs",
    "echo": "a chat's prompt is made by the template, and clients never see its text",
    **dict.fromkeys(("tools", "tool_choice", "parallel_tool_calls"), CALLS),
    **dict.fromkeys(("add_generation_prompt", "continue_final_message", "chat_template_kwargs"), TEMPLATE),
    "reasoning_effort": TEMPLATE,
}
CHATS_AND_RESPONSES = {
    "messages": f"{NAME} input and instructions",
    **dict.fromkeys(("input", "instructions"), f"{NAME} messages"),
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), f"{NAME} max_output_tokens"),
    "max_output_tokens": f"{NAME} max_tokens",
    "response_format": f"{NAME} text.format",
    "text": f"{NAME} response_format",
    "reasoning_effort": f"{NAME} reasoning.effort",
    "reasoning": f"{NAME} reasoning_effort",
    "logprobs": f"{NAME} an entry of include",
    "include": f"{NAME} logprobs",
    "metadata": "a response repeats it, and a chat ignores it",
    "stream_options": STREAMS,
    **dict.fromkeys(("n", "best_of"), "a response is one answer"),
    "arbordraft": ITEMS,
    **dict.fromkeys(("add_generation_prompt", "continue_final_message"), "items are whole turns"),
}
REQUESTS_AND_QUESTIONS = {
    "max_new_tokens": "the server's name is max_tokens",
    "min_new_tokens": "the server's name is min_tokens",
    "ends": "the server's name is ignore_eos, which takes all ends away",
    "prompt_logprobs": "completions ask with echo and logprobs",
    "grammar": "the server's names are response_format and tools",
    "processors": "they are Python objects",
    "priority": "clients would overtake each other; the field is a hint",
    "max_drafts": "the server's name is speculative, which also has a switch",
}


def differing(one, other, loose=False):
    """Returns the fields that only one of two types has, or that both have in another form."""

    def form(kind, name):
        field = kind.model_fields[name]
        return field.annotation, field.default, field.default_factory, tuple(map(repr, field.metadata))

    shared = one.model_fields.keys() & other.model_fields.keys()
    changed = set() if loose else {name for name in shared if form(one, name) != form(other, name)}
    return one.model_fields.keys() ^ other.model_fields.keys() | changed


def test_chats_and_completions_differ_only_for_a_reason():
    assert differing(ChatRequest, CompletionRequest) == CHATS_AND_COMPLETIONS.keys(), "take the field, or say why not"


def test_chats_and_responses_differ_only_for_a_reason():
    """The chat that answers a response checks the values of shared fields."""
    found = differing(ChatRequest, ResponsesRequest, loose=True)
    assert found == CHATS_AND_RESPONSES.keys(), "take the field, or say why not"


def test_requests_and_questions_differ_only_for_a_reason():
    """Every setting of a request can be asked for."""
    asked = CompletionRequest.model_fields.keys()
    assert {field.name for field in fields(Request)} - asked == REQUESTS_AND_QUESTIONS.keys(), "take it, or say why not"
    assert "priority" in REQUEST_HINTS


def test_a_new_field_needs_a_reason():
    class Longer(ChatRequest):
        fresh: int = 0

    class Changed(CompletionRequest):
        top_p: float = 0.5

    assert differing(Longer, CompletionRequest) - CHATS_AND_COMPLETIONS.keys() == {"fresh"}
    assert differing(ChatRequest, Changed) - CHATS_AND_COMPLETIONS.keys() == {"top_p"}


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest, ResponsesRequest])
def test_the_documentation_names_every_field(kind):
    text = (Path(__file__).parents[2] / "docs/serve.md").read_text(encoding="utf-8")
    assert [name for name in kind.model_fields if f"`{name}`" not in text and f'"{name}"' not in text] == []

"""First words of user turns, which a target completes when it writes its own prompts.

Left to itself a small model asks few kinds of questions about few things; what real users ask for (long inputs,
translations, code, letters) has to be begun for it, and its vocabulary says what it knows more of.
"""

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_WORD_BEGINS = ("\u0120", "\u2581")  # marks of a space before a word: of byte-level vocabularies and of SentencePiece
_SHORTEST_WORD = 4  # letters


class Opening(NamedTuple):
    """How a user turn begins, and the most tokens that may follow."""

    text: str
    limit: int


class _Kind(NamedTuple):
    """Openings of one kind, separated by ``|``; every distinct limit costs a batch of its own.

    ``{word}`` stands last, as the model may have to complete it.
    """

    weight: int
    texts: str
    limit: int = 80


_KINDS = (
    _Kind(10, ""),
    _Kind(
        28,
        "What is {word}|What are {word}|Explain {word}|Explain the concept of {word}|How does {word}|How do {word}|"
        "Discuss the role of {word}|Discuss {word}|Compare {word}|Compare and contrast {word}|Describe {word}|"
        "What is the difference between {word}|Describe the process of {word}|Why is {word}|Why do {word}|"
        "What caused {word}|What are the effects of {word}|What are the main {word}|Tell me about {word}|"
        "Give an overview of {word}|Analyze {word}|How did {word}|Who was {word}|When did {word}|Evaluate {word}|"
        "What is the relationship between {word}|What do we know about {word}|Outline the history of {word}|"
        "What are the advantages of {word}|Give examples of {word}|Argue for or against {word}|How is {word}|"
        "What would happen without {word}|How can one measure {word}|What is the significance of {word}|Define {word}",
    ),
    _Kind(
        8,
        "What is|What are the|Why|How does|How do I|How can|Who is|Where|Which|Can you explain|Explain {topic} to|"
        "What would happen if|Describe the difference between|Is it true that|Should I|"
        "What do you think about {topic}|What were the main causes of|Give me some advice|In what way",
    ),
    _Kind(
        15,
        "Write a short story about {word}|Write a poem about {word}|Write a blog post about {word}|"
        "Write an essay on {word}|Write an email to|Draft a letter to|Compose a song about {word}|"
        "Write a persuasive essay about {word}|"
        "Write a product description for {word}|Describe {topic} as if|Write a dialogue between {person} and|"
        "Write a speech about {topic} for|Create a slogan for {word}|Write a review of {word}|Write a one-paragraph|"
        "Rewrite the opening of|Help me write|Come up with|Write a news article about {word}|"
        "Draft a proposal for {word}",
    ),
    _Kind(
        9,
        "Imagine you are {person}.|Pretend to be {person} and|Act as {person}.|You are {person}.|You are a {word}|"
        "I want you to play the role of {person}.|Speak like {person} and|Take on the role of a {word}|"
        "Suppose you met {person}.|Answer as {person} would:|Imagine that you are {word}|Pretend to be {word}",
    ),
    _Kind(
        10,
        "A store sells|If a train|John has|Maria is twice as|A farmer|There are|Solve for x:|Calculate|"
        "What is the sum of|Find the|A car travels|The average of|If the area of|A rectangle|Suppose that|"
        "How many ways|Anna is standing|All of the {word}|Each day,|A box holds|Simplify|What is the probability|"
        "The price of {word}|Tom and his|One morning,|Which word does not|How many {word}",
    ),
    _Kind(
        8,
        "Write a {code} function that|Write a {code} program to|Implement|How do I use {code} to|"
        "Fix the bug in the following {code} code:\n|Explain what this {code} code does:\n\n|def |Given a list of|"
        "Given an array of integers|Write a query that|Design an algorithm|Write a regular expression|"
        "What is the output of this {code} program?\n\n|Create a web page",
    ),
    _Kind(
        10,
        "Summarize the following article:\n\n{word}|Summarize this text in one sentence:|Here is a text about {word}|"
        "Read the following passage and answer the question.\n\n{word}|Context: {word}|Based on the passage below,|"
        "Extract the names, dates and numbers from the following text:\n|Given the following reviews,|"
        "Edit the following paragraph and correct the grammar:\n\n|Passage: {word}|Document: {word}|"
        "The following is a news report.\n\n{word}|Identify all people and places in this text:",
        limit=200,
    ),
    _Kind(
        4,
        "Translate this sentence into {language}:|Translate the following text from {language} to English:\n|"
        "How do you say|What does the {language} word|Translate into {language}:|Correct my {language}:|Übersetze|"
        "Comment|¿Cuál es",
    ),
    _Kind(
        5,
        "Classify|List|List five {word}|Give three {word}|Make a table of {word}|Create a list of {word}|Name|Rank|"
        "Rephrase this sentence:|Extract|Generate|Put the following in order:|Choose|Complete:|Plan|"
        "Create a schedule for|Suggest|Identify|Turn this into bullet points:",
    ),
)
_TOPICS = (
    "a small bakery|volcanoes|the history of chess|renewable energy|a lost letter|electric cars|bees|a school garden|"
    "ancient Rome|the human heart|remote work|a detective|black holes|jazz|coffee|climate change|a dragon|"
    "online privacy|the moon|vaccines|a railway journey|birds|the stock market|sleep|robots|a lighthouse|photography|"
    "the ocean|friendship|artificial intelligence|a grandmother|marathon running|glaciers|the printing press|"
    "inflation|a haunted house|tea|DNA|public transport|a job interview|gardening|gravity|tourism|a football team|"
    "mathematics|bread|social media|the Silk Road|dinosaurs|a wedding|urban planning|honesty|quantum computers|rain"
)
_PEOPLE = (
    "a doctor|a pirate|a museum guide|a chess coach|a travel agent|a Roman soldier|a chef|a poet|"
    "a customer service agent|a history teacher|a stand-up comedian|an astronaut|a financial adviser|a gardener|"
    "a strict editor|a wise old wizard|a software engineer|a job applicant|a talking cat"
)
_LANGUAGES = "French|Spanish|German|Italian|English|Portuguese"
_LANGUAGES_OF_CODE = "Python|JavaScript|C++|Java|SQL|Python|Python|HTML|Go"


def known_words(tokenizer: "PreTrainedTokenizerBase") -> list[str]:
    """Words that are tokens: names of more things than any list would hold. Some are only beginnings of words."""
    begun = (piece for piece in tokenizer.get_vocab() if piece[:1] in _WORD_BEGINS)
    words = {str(tokenizer.convert_tokens_to_string([piece])).strip() for piece in begun}
    return sorted(word for word in words if len(word) >= _SHORTEST_WORD and word.isalpha())


def draw_opening(source: random.Random, words: Sequence[str] = ()) -> Opening:
    """The beginning of one user turn; empty for about a tenth of them.

    Args:
        source: of chance.
        words: what to ask about, see :func:`known_words`; a short list of topics if there are none.
    """
    kind = source.choices(_KINDS, [kind.weight for kind in _KINDS])[0]
    text, topic, person, language, code = (
        source.choice(texts.split("|")) for texts in (kind.texts, _TOPICS, _PEOPLE, _LANGUAGES, _LANGUAGES_OF_CODE)
    )
    word = source.choice(words) if words else topic
    return Opening(text.format(topic=topic, word=word, person=person, language=language, code=code), kind.limit)

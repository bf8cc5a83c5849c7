"""First words of user turns, which a target completes when it writes its own prompts.

Left to itself a small model asks few kinds of questions; what real users ask for (long inputs, translations, code,
letters) has to be begun for it.
"""

import random
from typing import NamedTuple


class Opening(NamedTuple):
    """How a user turn begins, and the most tokens that may follow."""

    text: str
    limit: int


class _Kind(NamedTuple):
    """Openings of one kind, separated by ``|``; every distinct limit costs a batch of its own."""

    weight: int
    texts: str
    limit: int = 80


_KINDS = (
    _Kind(22, ""),
    _Kind(
        14,
        "Write a short story about {topic}|Write a poem about {topic}|Write a blog post about {topic}|"
        "Write an email to|Draft a letter to|Compose a song about {topic}|Write a persuasive essay|"
        "Write a product description for|Describe {topic} as if|Write a dialogue between {person} and|"
        "Write a speech about {topic} for|Create a slogan|Write a review of|Write a one-paragraph|"
        "Rewrite the opening of|Help me write|Come up with|Write a news article about {topic}",
    ),
    _Kind(
        9,
        "Imagine you are {person}.|Pretend to be {person} and|Act as {person}.|You are {person}.|"
        "I want you to play the role of {person}.|Speak like {person} and|Take on the role of {person}|"
        "Suppose you met {person}.|Answer as {person} would:",
    ),
    _Kind(
        16,
        "What is|What are the|Why|Why do|How does|How do I|How can|Who was|Who is|When|Where|Which|Can you explain|"
        "Explain|Explain {topic} to|What causes|Tell me about {topic}|What would happen if|"
        "Describe the difference between|Compare|Is it true that|Should I|What do you think about {topic}|"
        "What were the main causes of|Give me some advice|What is the role of|Define|Discuss {topic}|Outline|"
        "In what way",
    ),
    _Kind(
        11,
        "A store sells|If a train|John has|Maria is twice as|A farmer|There are|Solve for x:|Calculate|"
        "What is the sum of|Find the|A car travels|The average of|If the area of|A rectangle|Suppose that|"
        "How many ways|Anna is standing|All of the|Each day,|A box holds|Simplify|What is the probability|"
        "The price of|Tom and his|One morning,|Which word does not",
    ),
    _Kind(
        10,
        "Write a {code} function that|Write a {code} program to|Implement|How do I use {code} to|"
        "Fix the bug in the following {code} code:\n|Explain what this {code} code does:\n\n|def |Given a list of|"
        "Given an array of integers|Write a query that|Design an algorithm|Write a regular expression|"
        "What is the output of this {code} program?\n\n|Create a web page",
    ),
    _Kind(
        8,
        "Summarize the following article:\n\n|Summarize this text in one sentence:|Here is a text about {topic}:\n\n|"
        "Read the following passage and answer the question.\n\n|Context: |Based on the passage below,|"
        "Extract the names, dates and numbers from the following text:\n|Given the following reviews,|"
        "Edit the following paragraph and correct the grammar:\n\n|Passage: |Document: |"
        "The following is a news report.\n\n|Identify all people and places in this text:",
        limit=200,
    ),
    _Kind(
        6,
        "Translate this sentence into {language}:|Translate the following text from {language} to English:\n|"
        "How do you say|What does the {language} word|Translate into {language}:|Correct my {language}:|Übersetze|"
        "Comment|¿Cuál es",
    ),
    _Kind(
        4,
        "Classify|List|List five|Give three|Make a table of|Create a list of|Name|Rank|Rephrase this sentence:|"
        "Extract|Generate|Put the following in order:|Choose|Complete:|Plan|Create a schedule for|Suggest|Identify|"
        "Turn this into bullet points:",
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


def draw_opening(source: random.Random) -> Opening:
    """The beginning of one user turn; empty for about a fifth of them."""
    kind = source.choices(_KINDS, [kind.weight for kind in _KINDS])[0]
    text, topic, person, language, code = (
        source.choice(texts.split("|")) for texts in (kind.texts, _TOPICS, _PEOPLE, _LANGUAGES, _LANGUAGES_OF_CODE)
    )
    return Opening(text.format(topic=topic, person=person, language=language, code=code), kind.limit)

"""First words of user turns, which a target completes to write its own prompts.

Without them, a small model asks few kinds of questions about few things. Requests of real users (long inputs,
translations, code, letters) have to be begun for it. Its vocabulary names further things that it knows.
"""

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_WORD_BEGINS = ("\u0120", "\u2581")  # marks of a space before a word: of byte-level vocabularies and of SentencePiece
_SHORTEST_WORD = 4  # letters


class PromptTemplate(NamedTuple):
    """The first words of a user turn, and the most tokens that may follow.

    With ``around``, ``text`` is a request instead. The turn is then ``around``, with the target's answer in the place
    of ``{text}``. If ``around`` ends in the middle of a sentence, the target completes the question.
    """

    kind: str
    text: str
    limit: int = 80
    around: str = ""


class _Kind(NamedTuple):
    """Prompt templates of one kind, separated by ``|``; every distinct limit costs a batch of its own.

    ``{word}`` stands at the end of a text that the model continues, since the word itself may be incomplete.
    """

    weight: int
    texts: str
    limit: int = 80
    around: str = ""


_KINDS = {
    "free": _Kind(6, ""),
    "knowledge": _Kind(
        18,
        "What is {word}|What are {word}|Explain {word}|Explain the concept of {word}|How does {word}|How do {word}|"
        "Discuss the role of {word}|Discuss {word}|Compare {word}|Compare and contrast {word}|Describe {word}|"
        "What is the difference between {word}|Describe the process of {word}|Why is {word}|Why do {word}|"
        "What caused {word}|What are the effects of {word}|What are the main {word}|Tell me about {word}|"
        "Give an overview of {word}|Analyze {word}|How did {word}|Who was {word}|When did {word}|Evaluate {word}|"
        "What is the relationship between {word}|What do we know about {word}|Outline the history of {word}|"
        "What are the advantages of {word}|Give examples of {word}|Argue for or against {word}|How is {word}|"
        "What would happen without {word}|How can one measure {word}|What is the significance of {word}|Define {word}",
    ),
    "question": _Kind(
        6,
        "What is|What are the|Why|How does|How do I|How can|Who is|Where|Which|Can you explain|Explain {topic} to|"
        "What would happen if|Describe the difference between|Is it true that|Should I|"
        "What do you think about {topic}|What were the main causes of|Give me some advice|In what way",
    ),
    "writing": _Kind(
        13,
        "Write a short story about {word}|Write a poem about {word}|Write a blog post about {word}|"
        "Write an essay on {word}|Write an email to|Draft a letter to|Compose a song about {word}|"
        "Write a persuasive essay about {word}|"
        "Write a product description for {word}|Describe {topic} as if|Write a dialogue between {person} and|"
        "Write a speech about {topic} for|Create a slogan for {word}|Write a review of {word}|Write a one-paragraph|"
        "Rewrite the opening of|Help me write|Come up with|Write a news article about {word}|"
        "Draft a proposal for {word}",
    ),
    "role": _Kind(
        8,
        "Imagine you are {person}.|Pretend to be {person} and|Act as {person}.|You are {person}.|You are a {word}|"
        "I want you to play the role of {person}.|Speak like {person} and|Take on the role of a {word}|"
        "Suppose you met {person}.|Answer as {person} would:|Imagine that you are {word}|Pretend to be {word}",
    ),
    "mathematics": _Kind(
        12,
        "A store sells|If a train|John has|Maria is twice as|A farmer|There are|Solve for x:|Calculate|"
        "What is the sum of|Find the|A car travels|The average of|If the area of|A rectangle|Suppose that|"
        "How many ways|Anna is standing|All of the {word}|Each day,|A box holds|Simplify|What is the probability|"
        "The price of {word}|Tom and his|One morning,|Which word does not|How many {word}",
    ),
    "code": _Kind(
        10,
        "Write a {code} function that|Write a {code} program to|Implement|How do I use {code} to|"
        "Fix the bug in the following {code} code:\n|Explain what this {code} code does:\n\n|def |Given a list of|"
        "Given an array of integers|Write a query that|Design an algorithm|Write a regular expression|"
        "What is the output of this {code} program?\n\n|Create a web page",
    ),
    "code to read": _Kind(
        3,
        "Write a short {code} function.|Write a {code} function that sorts.|Write a small {code} program about {word}|"
        "Write a {code} class for {topic}.|Write a {code} function that uses a loop.",
        80,
        "Explain what this code does:\n\n{text}|Find the bug:\n\n{text}|{text}\n\nWhat does this code return?|"
        "Add comments to this code:\n\n{text}|{text}\n\nRewrite this in Python.|Improve this code:\n\n{text}",
    ),
    "summary": _Kind(
        7,
        "Write an article about {word}|Write a news report about {word}|Write a story about {word}|"
        "Write an encyclopedia article about {word}|Write a report on {word}|Write a story about {person}.|"
        "Write a dialogue between {person} and a customer.|Write a detailed letter about {topic}.",
        200,
        "Summarize this:\n\n{text}|Summarize the following text in one sentence.\n\n{text}|{text}\n\nTL;DR:|"
        "{text}\n\nSummarize the article in a few sentences.|{text}\n\nWhat are the main points?|"
        "{text}\n\nWrite a short summary of the text above.|Summarize in three bullet points:\n\n{text}",
    ),
    "retrieval": _Kind(
        8,
        "Write an encyclopedia article about {word}|Write a news report about {word}|Write a biography of {word}|"
        "Describe the history of {word}|Write a text with many names, dates and numbers about {topic}.|"
        "Write a story about {person}.|Write three short reviews of {word}|Write a report on {word}",
        200,
        "{text}\n\nQuestion: What|{text}\n\nQuestion: Who|{text}\n\nQuestion: Why|{text}\n\nQuestion: When|"
        "{text}\n\nQuestion: Where|{text}\n\nQuestion: How|Context: {text}\n\nBased on the context, what|"
        "Passage: {text}\n\nAccording to the passage, which|Read this passage.\n\n{text}\n\nAnswer briefly: how|"
        "Extract all names, dates and numbers:\n\n{text}|{text}\n\nWho or what is the text about?|"
        "Identify all people and places in this text:\n\n{text}|{text}\n\nIs the text positive or negative? Explain.",
    ),
    "translation": _Kind(
        5,
        "Write one sentence about {word}|Write two sentences about {topic}.|Tell me one fact about {word}|"
        "Write the first sentence of a story about {person}.|Write a short news item about {word}",
        80,
        "Translate this into {language}: {text}|Translate to {language}: {text}|"
        "Translate English to {language}: {text}|{text}\n\nTranslate this into {language}.|"
        "Translate the following text from English to {language}:\n\n{text}",
    ),
    "translation back": _Kind(
        3,
        "Write one sentence in {language} about {topic}.|Write two sentences in {language} about {person}.|"
        "Write a short news item in {language} about {word}",
        80,
        "Translate {language} to English: {text}|Translate this into English: {text}|"
        "{text}\n\nTranslate into English.|Translate the text from {language} to English:\n\n{text}|"
        "What does this mean in English? {text}",
    ),
    "other": _Kind(
        4,
        "Classify|List|List five {word}|Give three {word}|Make a table of {word}|Create a list of {word}|Name|Rank|"
        "Rephrase this sentence:|Extract|Generate|Put the following in order:|Choose|Complete:|Plan|"
        "Edit the following paragraph and correct the grammar:\n\n|"
        "Create a schedule for|Suggest|Identify|Turn this into bullet points:",
    ),
}
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
_LANGUAGES = "French|Spanish|German|Italian|Portuguese|German"
_LANGUAGES_OF_CODE = "Python|JavaScript|C++|Java|SQL|Python|Python|HTML|Go"


def known_words(tokenizer: "PreTrainedTokenizerBase") -> list[str]:
    """Returns words that are tokens, more than any list would hold; some are only beginnings of words."""
    begun = (token for token in tokenizer.get_vocab() if token[:1] in _WORD_BEGINS)
    words = {str(tokenizer.convert_tokens_to_string([token])).strip() for token in begun}
    return sorted(word for word in words if len(word) >= _SHORTEST_WORD and word.isalpha())


def draw_prompt_template(source: random.Random, words: Sequence[str] = ()) -> PromptTemplate:
    """Draws the beginning of one user turn; about one in 17 is empty.

    Args:
        source: source of randomness.
        words: words to ask about, see :func:`known_words`; by default topics of a short list.
    """
    name = source.choices([*_KINDS], [kind.weight for kind in _KINDS.values()])[0]
    kind = _KINDS[name]
    text, around, topic, person, language, code = (
        source.choice(texts.split("|"))
        for texts in (kind.texts, kind.around, _TOPICS, _PEOPLE, _LANGUAGES, _LANGUAGES_OF_CODE)
    )
    word = source.choice(words) if words else topic
    text, around = (
        form.format(topic=topic, word=word, person=person, language=language, code=code, text="{text}")
        for form in (text, around)
    )
    return PromptTemplate(name, text, kind.limit, around)

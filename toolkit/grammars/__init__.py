"""Structured output: grammars of answers, enforced token by token."""

from arbordraft.grammars.checking import SchemaCheck
from arbordraft.grammars.compiler import GrammarCompiler
from arbordraft.grammars.engine import GrammarError
from arbordraft.grammars.grammar import Grammar, grammars_of

__all__ = ["Grammar", "GrammarCompiler", "GrammarError", "SchemaCheck", "grammars_of"]

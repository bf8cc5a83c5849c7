"""Conversation in the terminal: streams answers, obeys commands, draws the last draft tree."""

import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from arbordraft.cli.display import step_tree
from arbordraft.cli.failures import Terminated, print_error
from arbordraft.decoding.decoder import SpeculativeDecoder
from arbordraft.decoding.detokenizing import IncrementalDetokenizer
from arbordraft.decoding.engine import Engine
from arbordraft.decoding.requests import Request
from arbordraft.decoding.streams import Answer
from arbordraft.decoding.text import encode
from arbordraft.kernels.machine import cache_folder
from arbordraft.kernels.progress import phase
from arbordraft.trees.draft_tree import SampleTree
from arbordraft.trees.verdict import SampleVerdict

HELP = """\
/tree    the draft tree of the last step, accepted nodes marked
/clear   forget the conversation
/help    this list
/quit    leave, as /exit and Ctrl-D do; Ctrl-C stops an answer"""


@dataclass
class Session:
    """Conversation, with the tree and the verdict of its last step.

    The engine's cache holds earlier messages, so a turn prefills only new ones.

    Args:
        settings: settings of every answer, as arguments of :class:`~arbordraft.Request`.
        messages: the conversation so far, without the system prompt.
        failed: whether any message could not be answered.
    """

    decoder: SpeculativeDecoder
    settings: dict[str, Any]
    console: Console
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    failed: bool = False
    _answer: Answer | None = None
    _last: tuple[SampleTree, SampleVerdict] | None = None
    _seconds: float = 0.0

    def __post_init__(self) -> None:
        self.engine = Engine(self.decoder, max_samples=1).start()  # its thread keeps Ctrl-C out of steps

    def answer(self, text: str) -> None:
        """Streams the answer to a message; the conversation stays usable if the answer fails or is stopped."""
        asked = [*self.messages, {"role": "user", "content": text}]
        parts: list[str] = []
        start = time.perf_counter()
        try:
            with typed_ahead(), closing(self._texts(asked)) as texts:
                with phase("reading the conversation"):
                    first = next(texts, "")
                for part in chain([first], texts):
                    parts.append(part)
                    self.console.print(Text(part), end="")
            cut = self._answer is not None and self._answer.finish_reason == "length"
            if cut and self.console.is_terminal:
                self.console.print(Text(" [cut at its longest length]", style="dim"), end="")
        except Terminated:
            raise
        except KeyboardInterrupt:
            if not self.console.is_terminal:  # without a terminal, Ctrl-C ends the command
                raise
            self.console.print(Text(" [stopped]", style="dim"), end="")
        except (ValueError, FloatingPointError, RuntimeError) as error:  # such as a prompt that is too long
            self.failed = True
            print_error(f"error: {error}")
        self._seconds = time.perf_counter() - start
        self.console.print()
        if parts:
            self.messages = [*asked, {"role": "assistant", "content": "".join(parts)}]

    def _texts(self, asked: list[dict[str, str]]) -> Generator[str]:
        """Yields the text that answers these messages; closing the generator cancels the answer."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        prompt = encode(self.decoder.target.tokenizer, [*system, *asked], raw=False)
        assert self.decoder.target.tokenizer is not None
        detokenizer = IncrementalDetokenizer(self.decoder.target.tokenizer)
        with self.engine.submit(Request(prompt=prompt, **self.settings)) as stream:
            (self._answer,) = stream.answers
            for event in stream:
                if event.tree is not None and event.verdict is not None:
                    self._last = event.tree, event.verdict
                yield detokenizer.add(event.tokens) if event.finish_reason is None else detokenizer.end()

    def show_tree(self) -> None:
        """Draws the draft tree of the last step."""
        tokenizer = self.decoder.target.tokenizer
        if self._last is None or tokenizer is None:
            self.console.print("nothing was drafted yet: say something first")
            return
        self.console.print(step_tree(*self._last, lambda token: str(tokenizer.decode([token]))))

    def clear(self) -> None:
        """Forgets the conversation."""
        self.messages, self._last, self._answer = [], None, None
        self.console.print("forgotten")

    def status(self) -> str:
        """Describes in one line how fast the last answer was."""
        if self._answer is None:
            return "no answer yet"
        tokens, forwards = len(self._answer.tokens), self._answer.stats.forwards
        speed = tokens / self._seconds if self._seconds else 0.0
        exactness = self.decoder.coupling.exactness
        return f"tau {tokens / max(1, forwards):.2f}   {speed:.0f} tokens/s   {tokens} tokens   {exactness}"


def converse(session: Session, lines: Iterator[str]) -> None:
    """Answers lines and obeys commands until the lines end or /quit or /exit comes."""
    commands: dict[str, Callable[[], None]] = {
        "/tree": session.show_tree,
        "/clear": session.clear,
        "/help": lambda: session.console.print(HELP),
    }
    for line in lines:
        text = line.strip()
        if text in ("/quit", "/exit"):
            return
        if text in commands:
            commands[text]()
        elif text.startswith("/") and " " not in text:
            session.console.print(f"unknown command {text}: /help lists them")
        elif text:
            session.answer(text)


def typed_lines(session: Session) -> Iterator[str]:
    """Yields lines from the terminal until Ctrl-D; arrow keys recall earlier ones."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory

    prompt: PromptSession[str] = PromptSession(
        history=FileHistory(str(_history_file())), bottom_toolbar=session.status, enable_history_search=True
    )
    while True:
        try:
            yield prompt.prompt("> ")
        except Terminated:
            raise
        except KeyboardInterrupt:
            continue  # as shells do: a new line
        except EOFError:
            return


@contextmanager
def typed_ahead() -> Iterator[None]:
    """Keeps keys that are typed inside the block for the next prompt: they are not shown, and Ctrl-C keeps them."""
    try:
        import termios

        terminal = sys.stdin.fileno()
        before = termios.tcgetattr(terminal)
    except (ImportError, OSError, ValueError, termios.error):  # no terminal, or Windows
        yield
        return
    changed = [*before]
    changed[3] = before[3] & ~termios.ECHO | termios.NOFLSH
    termios.tcsetattr(terminal, termios.TCSANOW, changed)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, before)


def _history_file() -> Path:
    """Returns the file of earlier messages, which only its owner may read."""
    file = cache_folder() / "chat-history"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch(mode=0o600)
    return file


__all__ = ["HELP", "Session", "converse", "typed_ahead", "typed_lines"]

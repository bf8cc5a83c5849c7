"""``arbordraft chat``: answers, commands and output, line by line from a pipe."""

import io
import os
import pty
import select
import termios
import time
from contextlib import nullcontext

import pytest
from rich.console import Console
from support.models import fusable, tiny, tiny_checkpoint, tiny_tokenizer
from typer.testing import CliRunner

from arbordraft import Fixed, NGramDrafter, RaggedModel, SpeculativeDecoder, TreeTopology
from arbordraft.cli.display import step_tree
from arbordraft.cli.failures import Terminated
from arbordraft.cli.main import app
from arbordraft.cli.session import Session, converse, typed_ahead, typed_lines
from arbordraft.target.cache import RaggedKVCache
from arbordraft.trees.draft_tree import DraftTree
from arbordraft.trees.verdict import SampleVerdict

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture
def session():
    """Returns a conversation with a tiny model, whose console keeps all output."""
    tokenizer = tiny_tokenizer(chat_template=TEMPLATE)
    target = RaggedModel(tiny(max_position_embeddings=64), tokenizer, kernels="torch")
    console = Console(file=io.StringIO(), width=100)
    decoder = SpeculativeDecoder(target, NGramDrafter(), TreeTopology.chain(3))
    return Session(decoder, {"max_new_tokens": 8}, console)


def shown(session):
    return session.console.file.getvalue()


def test_an_answer_is_that_of_decoder_chat_and_joins_the_conversation(session):
    converse(session, iter(["abc\n", "\n", "  \n", "abd"]))
    first, second = (message["content"] for message in session.messages if message["role"] == "assistant")
    assert [message["role"] for message in session.messages] == ["user", "assistant"] * 2
    assert first == session.decoder.chat([{"role": "user", "content": "abc"}], max_new_tokens=8)
    assert second == session.decoder.chat(session.messages[:3], max_new_tokens=8)
    assert shown(session) == f"{first}\n{second}\n"


def test_reading_the_conversation_is_reported(session, caplog):
    caplog.set_level("INFO", "arbordraft")
    session.answer("abc")
    assert "reading the conversation ..." in [record.getMessage() for record in caplog.records]


def test_the_system_prompt_stands_before_every_answer(session):
    session.system = "hijk"
    session.answer("abc")
    asked = [{"role": "system", "content": "hijk"}, {"role": "user", "content": "abc"}]
    assert session.messages[-1]["content"] == session.decoder.chat(asked, max_new_tokens=8)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["/help"], "/tree "),
        (["/tree"], "nothing was drafted yet"),
        (["abcabcabc", "/tree"], "by one forward"),
        (["/clear"], "forgotten"),
        (["/nonsense"], "unknown command /nonsense: /help lists them"),
        (["/quit", "abc"], ""),
        (["/exit", "abc"], ""),
    ],
    ids=["help", "tree too early", "tree", "clear", "unknown", "quit", "exit"],
)
def test_commands_are_obeyed(session, lines, expected):
    converse(session, iter(lines))
    assert expected in shown(session) if expected else not shown(session)


def test_clear_forgets_the_conversation(session):
    converse(session, iter(["abc", "/clear"]))
    assert session.messages == []
    assert session.status() == "no answer yet"


def test_the_status_line_counts_tokens(session):
    session.answer("abc")
    tokens = len(session._answer.tokens)
    assert f"{tokens} tokens " in session.status()
    assert session.status().startswith("tau ")
    assert session.status().endswith("pathwise")


def test_a_message_that_is_too_long_leaves_the_session_usable(session, capsys):
    converse(session, iter(["a" * 100, "abc"]))
    assert session.failed
    assert "64 positions" in capsys.readouterr().err
    assert session.messages[0]["content"] == "abc"


def test_an_answer_that_is_cut_says_so_on_a_terminal(session):
    session.console = Console(file=io.StringIO(), force_terminal=True, color_system=None)
    session.answer("abc")
    assert session._answer.finish_reason == "length"
    assert shown(session).endswith(" [cut at its longest length]\n")
    assert "cut" not in session.messages[-1]["content"]


@pytest.mark.parametrize("held", [True, False])
def test_keys_typed_during_an_answer_wait_for_the_next_prompt(monkeypatch, held):
    """Without the block, the terminal shows them at once, and Ctrl-C discards them."""
    ours, theirs = pty.openpty()
    monkeypatch.setattr("sys.stdin", os.fdopen(theirs, "r"))
    settings = termios.tcgetattr(theirs)
    settings[3] &= ~termios.ECHOCTL
    termios.tcsetattr(theirs, termios.TCSANOW, settings)

    def read(terminal):
        return os.read(terminal, 100) if select.select([terminal], [], [], 0.2)[0] else b""

    with typed_ahead() if held else nullcontext():
        os.write(ours, b"next")
        assert read(ours) == (b"" if held else b"next")
        os.write(ours, b"\x03")  # Ctrl-C, whose signal no process here gets
        read(ours)
    settings[3] &= ~termios.ICANON
    termios.tcsetattr(theirs, termios.TCSANOW, settings)
    assert read(theirs) == (b"next" if held else b"")
    assert termios.tcgetattr(theirs)[3] & termios.ECHO
    os.close(ours)


def interrupted(session, stop):
    """Slows the steps of the session's decoder; its console raises ``stop`` after it shows a piece."""
    shows = session.console.print

    def show(*args, **kwargs):
        shows(*args, **kwargs)
        if session.engine.running and not stopped:
            stopped.append(True)
            raise stop

    stopped = []
    session.decoder.on_step = lambda *_: time.sleep(0.02)
    session.console.print = show


@pytest.mark.parametrize(
    ("stop", "terminal", "survives"),
    [(KeyboardInterrupt(), True, True), (KeyboardInterrupt(), False, False), (Terminated(), True, False)],
    ids=["Ctrl-C", "Ctrl-C without a terminal", "SIGTERM"],
)
def test_interrupts_stop_an_answer(session, stop, terminal, survives):
    session.settings = {"max_new_tokens": 40}
    session.console = Console(file=io.StringIO(), force_terminal=terminal, color_system=None)
    interrupted(session, stop)
    if survives:
        session.answer("abc")
        assert shown(session).endswith(" [stopped]\n")
        assert session.messages[-1]["content"] == shown(session).removesuffix(" [stopped]\n")
    else:
        with pytest.raises(type(stop)):
            session.answer("abc")
    assert session._answer is None or len(session._answer.tokens) < 40
    wait = time.monotonic() + 10
    while session.engine.running and time.monotonic() < wait:
        time.sleep(0.01)
    assert not session.engine.running  # decoding ends when no reader is left


@pytest.mark.parametrize("turns", [["abcdefgh" * 4, "i"], ["abcdefgh" * 4]], ids=["second turn", "first turn"])
def test_a_turn_reads_only_new_tokens(turns, monkeypatch):
    copied = []
    target = RaggedModel(fusable(), tiny_tokenizer(chat_template=TEMPLATE), kernels="native")
    decoder = SpeculativeDecoder(target, NGramDrafter(), TreeTopology.chain(3))
    share = RaggedKVCache.share
    monkeypatch.setattr(RaggedKVCache, "share", lambda *args: copied.append(args[-1]) or share(*args))
    session = Session(decoder, {"max_new_tokens": 8}, Console(file=io.StringIO()))
    converse(session, iter(turns))
    assert [count >= len(turns[0]) for count in copied] == [True] * (len(turns) - 1)
    assert session.messages[-1]["content"] == decoder.chat(session.messages[:-1], max_new_tokens=8)


@pytest.mark.parametrize("text", ["[red]", "[/bold]", "\\["], ids=repr)
def test_answers_are_not_read_as_markup(session, text):
    session._texts = lambda _: (part for part in [text])
    session.answer("abc")
    assert shown(session) == f"{text}\n"


def test_the_tree_of_a_step_marks_accepted_drafts():
    tree = DraftTree.of(TreeTopology.from_parents([-1, 0, 0, 1]), Fixed(2), [{0: 5, 1: 6, 2: 7, 3: 8}])[0]
    console = Console(file=io.StringIO(), width=80)
    console.print(step_tree(tree, SampleVerdict((0, 1), 9, True), str))
    drawn = console.file.getvalue()
    assert drawn.count("✓") == 1
    assert "'6' ✓" in drawn
    assert "the target adds '9' instead of the rejected drafts" in drawn
    assert "3 drafted, 1 accepted: 2 tokens by one forward" in drawn


@pytest.mark.parametrize(("lines", "status"), [("ab\n/tree\n", 0), ("a" * 100 + "\n", 1)], ids=["good", "too long"])
def test_piped_lines_are_answered(tmp_path, lines, status):
    tokenizer = tiny_tokenizer(eos_token="c", chat_template=TEMPLATE)
    folder = tiny_checkpoint(tmp_path, tokenizer, max_position_embeddings=64)
    arguments = ["chat", "--model", str(folder), "--drafter", "ngram", "--max-new-tokens", "6"]
    result = CliRunner().invoke(app, arguments, input=lines)
    assert result.exit_code == status, result.output
    assert ("by one forward" in result.output) == (status == 0)


def test_a_file_is_talked_to(tmp_path):
    """The file's own template and ends of turns are used."""
    pytest.importorskip("gguf")
    from support.gguf_files import LETTERS, write_gguf

    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    write_gguf(tmp_path / "x.gguf", fusable(vocab_size=len(LETTERS)), fields={"tokenizer.chat_template": template})
    arguments = ["chat", str(tmp_path / "x.gguf"), "--drafter", "ngram", "--max-new-tokens", "6"]
    result = CliRunner().invoke(app, arguments, input="ab\n/tree\n")
    assert result.exit_code == 0, result.output
    assert "by one forward" in result.output
    result = CliRunner().invoke(app, ["chat", str(tmp_path / "none.gguf")], input="ab\n")
    assert result.exit_code == 1


def test_typed_lines_go_through_prompt_toolkit(session, tmp_path, monkeypatch):
    from prompt_toolkit.application import create_app_session
    from prompt_toolkit.input import create_pipe_input
    from prompt_toolkit.output import DummyOutput

    monkeypatch.setenv("ARBORDRAFT_CACHE", str(tmp_path))
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        keys.send_text("abc\rdef\x03ghi\r\x04")  # Ctrl-C drops a line, Ctrl-D ends
        assert list(typed_lines(session)) == ["abc", "ghi"]
    history = tmp_path / "chat-history"
    assert "+abc" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0

"""The page in a real browser: it chats, draws every step, and can be used without a mouse."""

import json
import re
import shutil
import time

import pytest
from support.served import serving, tiny_decoder
from typer.testing import CliRunner

from arbordraft import Fixed
from arbordraft.cli.main import app
from arbordraft.serving.deltas import step_of
from arbordraft.serving.page import page
from arbordraft.trees.draft_tree import DraftTree
from arbordraft.trees.topology import TreeTopology
from arbordraft.trees.verdict import SampleVerdict

TREE = DraftTree.of(TreeTopology.from_parents([-1, 0, 0, 1, 1]), Fixed(2), [{0: 5, 1: 6, 2: 7, 4: 9}])[0]
MARKED = {"model": "tiny", "exactness": "exact", "prompt": "<b>who</b>", "text": "</script><b>me</b>", "steps": []}


@pytest.fixture(scope="module")
def browser():
    """Yields a headless Chromium."""
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("no Chromium to look at the page with; on Debian: apt install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def tab(browser):
    """Yields an empty tab; its script errors, and its requests to other hosts, fail the test."""
    tab, wrong = browser.new_page(), []
    tab.set_default_timeout(10_000)
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    tab.on("request", lambda asked: wrong.append(asked.url) if "127.0.0.1" not in asked.url else None)
    yield tab
    tab.close()
    assert [each for each in wrong if not each.startswith(("file:", "data:"))] == []


@pytest.fixture(scope="module")
def served():
    with serving(tiny_decoder()) as served:
        yield served


@pytest.mark.parametrize(
    ("verdict", "emitted", "accepted"),
    [
        (SampleVerdict((0, 1, 3), 3, False), 3, [1, 3]),
        (SampleVerdict((0, 2), 3, False), 2, [2]),
        (SampleVerdict((0,), 3, True), 1, []),
    ],
    ids=["a path", "a leaf", "nothing"],
)
def test_a_step_becomes_json(verdict, emitted, accepted):
    step = step_of(TREE, verdict, emitted, str)
    assert [node["text"] for node in step["nodes"]] == ["5", "6", "7", "9"]
    assert [node["parent"] for node in step["nodes"]] == [-1, 0, 0, 1]
    assert [place for place, node in enumerate(step["nodes"]) if node["accepted"]] == accepted
    assert (step["token"], step["recovered"], step["emitted"]) == ("3", verdict.recovered, emitted)
    assert json.loads(json.dumps(step)) == step


def test_the_page_fetches_nothing_from_other_hosts():
    assert re.findall(r"""(?:src|href)=["'](?!data:)|https?://(?!www\.w3\.org)|@import|url\(""", page()) == []


def test_recorded_text_cannot_end_the_script():
    assert page(MARKED).count("</script>") == page().count("</script>") == 1


def ask(tab, text="hello there"):
    tab.keyboard.type(text)
    tab.keyboard.press("Enter")
    tab.wait_for_function("!running && steps.length")


def test_a_chat_streams_and_draws_its_steps(served, tab):
    tab.goto(served.url)
    assert tab.locator("#model").text_content() == "tiny, pathwise"
    ask(tab)  # the field already has the focus
    steps, tokens = tab.evaluate("steps"), tab.evaluate("steps.reduce((sum, step) => sum + step.emitted, 0)")
    greedy = {"model": "tiny", "messages": [{"role": "user", "content": "hello there"}], "temperature": 0}
    (expected,) = served.client.chat.completions.create(**greedy).choices
    assert tab.locator("#said .assistant").text_content() == expected.message.content
    assert tab.locator("#tokens").text_content() == str(tokens)
    assert tab.locator("#tau").text_content() == f"{tokens / len(steps):.2f}"
    assert float(tab.locator("#speed").text_content()) > 0
    ask(tab, "and then")
    assert tab.evaluate("messages.map(said => said.role)") == ["user", "assistant"] * 2
    assert tab.evaluate("messages[1].content") == expected.message.content
    tab.get_by_text("New chat").press("Enter")
    assert tab.evaluate("messages.length") == 0
    assert tab.locator("#tau").text_content() == "-"
    assert tab.locator("#said p, #tree svg").count() == 0


def test_every_step_can_be_viewed_with_the_keyboard(served, tab):
    tab.goto(served.url)
    ask(tab)
    steps = tab.evaluate("steps")
    tab.locator("#step").focus()
    tab.keyboard.press("Home")
    seen = set()
    for number, step in enumerate(steps, 1):
        assert tab.locator("#summary").text_content().startswith(f"Step {number} of {len(steps)}: ")
        drafts = ["accepted" if node["accepted"] else "rejected" for node in step["nodes"][1:]]
        own = ["recovered" if step["recovered"] else "bonus"] * (step["emitted"] > drafts.count("accepted"))
        drawn = tab.evaluate("[...document.querySelectorAll('#tree g')].map(node => node.getAttribute('class'))")
        assert drawn == ["root", *drafts, *own]
        assert tab.locator("#tree path").count() == len(drawn) - 1
        places = "box => [box.getAttribute('x'), box.getAttribute('y')]"
        boxes = tab.evaluate(f"[...document.querySelectorAll('#tree rect')].map({places})")
        assert len(set(map(tuple, boxes))) == len(boxes)
        seen |= set(drawn)
        tab.keyboard.press("ArrowRight")
    assert seen == {"root", "accepted", "rejected", "recovered", "bonus"}


def test_escape_stops_an_answer(tab):
    decoder = tiny_decoder()
    decoder.on_step = lambda *_: time.sleep(0.05)
    with serving(decoder, default_tokens=400) as served:
        tab.goto(served.url)
        tab.keyboard.type("hello")
        tab.keyboard.press("Enter")
        tab.wait_for_function("steps.length > 1")
        tab.keyboard.press("Escape")
        tab.wait_for_function("!running")
        tab.wait_for_timeout(300)
        assert served.engine.running == 0
        assert tab.locator("#said .error").count() == 0
        assert tab.locator("#text").evaluate("field => field === document.activeElement")


def test_errors_are_shown_and_an_api_key_can_be_entered(tab):
    with serving(tiny_decoder(), api_key="secret") as served:
        tab.goto(served.url)
        assert not tab.locator("#key").is_visible()
        tab.keyboard.type("hello")
        tab.keyboard.press("Enter")
        assert "API key" in tab.locator("#said .error").text_content()
        tab.locator("#key").fill("secret")
        tab.locator("#text").focus()
        ask(tab)
        assert tab.locator("#said .error").count() == 1
        assert tab.locator("#said .assistant").text_content()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_follows_the_colour_scheme_and_is_readable(served, browser, scheme):
    tab = browser.new_page(color_scheme=scheme)
    tab.goto(served.url)
    colours = tab.evaluate("(style => [style.color, style.backgroundColor])(getComputedStyle(document.body))")
    ink, paper = (sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in colours)
    assert (ink > paper) == (scheme == "dark")
    assert abs(ink - paper) > 400
    tab.close()


def test_prompts_answers_and_tokens_are_not_read_as_markup(tab, tmp_path):
    step = {**step_of(TREE, SampleVerdict((0, 1), 3, True), 2, lambda token: f"<i>{token}</i>"), "seconds": 0.1}
    file = tmp_path / "trace.html"
    file.write_text(page({**MARKED, "steps": [step]}))
    tab.goto(file.as_uri())
    assert tab.locator("#said .user").text_content() == MARKED["prompt"]
    assert tab.locator("#said .assistant").text_content() == MARKED["text"]
    assert tab.locator("#said b, #tree i").count() == 0
    assert tab.locator("#tree g.accepted title").text_content() == '"<i>6</i>": accepted'
    assert not tab.locator("#ask").is_visible()


def test_trace_writes_a_page_of_the_same_answer(tab, served, tmp_path):
    decoder = served.engine.decoder
    folder, file = tmp_path / "model", tmp_path / "trace.html"
    decoder.target.model.save_pretrained(folder)
    decoder.target.tokenizer.save_pretrained(folder)
    arguments = ["trace", "hello there", "-o", str(file), "--model", str(folder), "--drafter", "ngram"]
    result = CliRunner().invoke(app, [*arguments, "--kernels", "torch", "--dtype", "float32", "--max-new-tokens", "40"])
    assert result.exit_code == 0, result.output
    tab.goto(file.as_uri())
    greedy = {"model": "tiny", "messages": [{"role": "user", "content": "hello there"}], "temperature": 0}
    (expected,) = served.client.chat.completions.create(**greedy).choices
    assert tab.locator("#said .assistant").text_content() == expected.message.content
    assert f"Step 1 of {tab.evaluate('steps.length')}: " in tab.locator("#summary").text_content()

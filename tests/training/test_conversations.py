"""Reading given conversations from files and datasets."""

import json
import sys

import pytest

from arbordraft.training.conversations import read_conversations

ASKED = [{"role": "user", "content": "why?"}]


def lines(folder, *rows: object):
    path = folder / "chats.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": " why?\n"}, {"role": "assistant", "content": "so"}]},
        {"conversations": [{"from": "human", "value": "why?"}, {"from": "gpt", "value": "so"}]},
        {"conversations": [{"role": "user", "content": "why?"}, {"role": "assistant", "content": None}], "id": 1},
        {"messages": None, "conversations": [{"from": "gpt", "value": "ask!"}, {"from": "user", "value": "why?"}]},
    ],
)
def test_all_forms_of_rows_give_the_users_messages(tmp_path, row):
    assert read_conversations(lines(tmp_path, row)) == [ASKED]
    assert read_conversations(str(lines(tmp_path, row))) == [ASKED]
    assert read_conversations([row]) == [ASKED]


def test_system_messages_and_later_turns_are_kept_in_order():
    said = [("system", "be brief"), ("human", "why?"), ("gpt", "so"), ("human", "and then?")]
    (found,) = read_conversations([{"conversations": [{"from": role, "value": text} for role, text in said]}])
    assert [tuple(message.values()) for message in found] == [
        ("system", "be brief"),
        ("user", "why?"),
        ("user", "and then?"),
    ]


def test_rows_with_a_known_first_question_or_none_are_left_out(tmp_path):
    silent = {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "  "}]}
    first, second = ({"messages": [*ASKED, {"role": "user", "content": text}]} for text in ("a", "b"))
    path = lines(tmp_path, silent, first, "", second, {"messages": []})
    assert read_conversations(path) == [[*ASKED, {"role": "user", "content": "a"}]]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("{", "every line must hold one JSON object"),
        ([1], "must have a list called messages or conversations"),
        ({"messages": "why?"}, "must have a list called messages or conversations"),
        ({"text": "why?"}, "must have a list called messages or conversations"),
        ({"messages": [{"role": "User", "content": "why?"}]}, "unknown role 'User'; known are system, user, human"),
        ({"messages": ["why?"]}, "unknown role 'None'"),
        ({"messages": [{"role": ["user"], "content": "why?"}]}, "unknown role"),
        ({"messages": [{"role": "user", "content": [{"text": "why?"}]}]}, "the user's message must be a text"),
        ({"messages": [{"from": "human"}]}, "the human's message must be a text"),
    ],
)
def test_invalid_rows_are_errors_that_name_the_line(tmp_path, row, problem):
    path = lines(tmp_path, {"messages": ASKED}, "", row)
    with pytest.raises(ValueError, match=problem) as error:
        read_conversations(path)
    assert str(error.value).startswith(f"{path}:3: ")


def test_invalid_utf8_is_an_error_that_names_the_line(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_bytes(b'\n{"messages": "\xff"}\n')
    with pytest.raises(ValueError, match=r"chats.jsonl:2: every line"):
        read_conversations(path)


def test_nothing_to_read_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"chats.jsonl holds no conversation"):
        read_conversations(lines(tmp_path, {"messages": []}))
    with pytest.raises(ValueError, match="list holds no conversation"):
        read_conversations([])
    with pytest.raises(FileNotFoundError, match=r"no file owner/chats; .* hf:owner/chats"):
        read_conversations("owner/chats")


def test_datasets_are_read_from_memory_from_disk_and_from_the_hub(tmp_path, monkeypatch):
    import datasets

    rows = [{"messages": [{"role": "user", "content": text}]} for text in ("why?", "who?")]
    data = datasets.Dataset.from_list(rows)
    expected = read_conversations(rows)
    assert len(expected) == 2
    assert read_conversations(data) == expected

    data.save_to_disk(tmp_path / "one")
    assert read_conversations(f"hf:{tmp_path / 'one'}") == expected
    datasets.DatasetDict(train=data, test=data.select([1])).save_to_disk(tmp_path / "two")
    assert read_conversations(f"hf:{tmp_path / 'two'}") == expected
    assert read_conversations(f"hf:{tmp_path / 'two'}:test") == expected[1:]
    with pytest.raises(ValueError, match="no split 'dev'; name one of train, test"):
        read_conversations(f"hf:{tmp_path / 'two'}:dev")

    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: asked.append((name, split)) or data)
    assert read_conversations("hf:owner/chats") == read_conversations("hf:owner/chats:train_sft") == expected
    assert asked == [("owner/chats", "train"), ("owner/chats", "train_sft")]


def test_a_bad_row_of_a_dataset_is_an_error_that_names_its_number():
    with pytest.raises(ValueError, match=r"^list, row 1: unknown role 'x'"):
        read_conversations([{"messages": ASKED}, {"messages": [{"role": "x"}]}])


def test_without_the_library_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'arbordraft\[train\]'"):
        read_conversations("hf:owner/chats")

"""Token shards: nothing is lost, damage is found, and folders are not mixed."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from arbordraft.training.shards import (
    ANSWER,
    GIVEN,
    MANIFEST,
    PROMPT,
    Conversation,
    ShardError,
    ShardFolder,
    pack,
    read_shard,
    write_shard,
)

CHATS = [
    Conversation([5, 6, 7], [GIVEN, ANSWER, ANSWER], 0.0),
    Conversation([8, 49_151, 2, 9], [GIVEN, PROMPT, GIVEN, ANSWER], 0.7),
]
SETTINGS = {"target": "tiny", "recipe": {"seed": 0, "temperatures": (0.0, 1.0)}}


@pytest.fixture
def folder(tmp_path) -> ShardFolder:
    folder = ShardFolder(tmp_path / "data")
    folder.claim(SETTINGS)
    write_shard(pack(CHATS, folder.path(0)))
    write_shard(pack(CHATS[1:], folder.path(1)))
    return folder


def test_written_shards_are_read_back(folder):
    first, second = folder.shards()
    assert (len(first), len(second)) == (2, 1)
    assert (first.tokens.dtype, first.roles.dtype) == (torch.int32, torch.uint8)
    for sequence, chat in enumerate(CHATS):
        span = slice(*first.offsets[sequence : sequence + 2].tolist())
        assert first.tokens[span].tolist() == chat.tokens
        assert first.roles[span].tolist() == chat.roles
        assert first.temperatures[sequence].item() == pytest.approx(chat.temperature)
    assert [path.name for path in sorted(folder.folder.iterdir())] == [
        MANIFEST,
        "tokens-00000.safetensors",
        "tokens-00001.safetensors",
    ]
    assert folder.hidden_path(second).name == "hidden-00001.safetensors"


def test_the_digest_depends_on_the_contents_alone(folder, tmp_path):
    first = read_shard(folder.path(0))
    assert first.digest == pack(CHATS, tmp_path / "elsewhere").digest
    changed = [CHATS[0], CHATS[1]._replace(roles=[GIVEN, GIVEN, GIVEN, ANSWER])]
    assert first.digest != pack(changed, tmp_path / "elsewhere").digest
    before = folder.digest()
    folder.path(1).unlink()
    assert folder.digest() != before


def test_bad_conversations_are_errors(tmp_path):
    with pytest.raises(ShardError, match=r"would be empty.*max_tokens or per_shard"):
        pack([], tmp_path / "shard")
    with pytest.raises(ValueError, match="one role per token"):
        pack([CHATS[0]._replace(roles=[ANSWER])], tmp_path / "shard")


def cut(path):
    path.write_bytes(path.read_bytes()[:-3])


def flip(path):
    found = bytearray(path.read_bytes())
    found[-1] ^= 1
    path.write_bytes(found)


def strip(path):
    save_file(load_file(path), path)


def drop(path):
    tensors = load_file(path)
    del tensors["roles"]
    save_file(tensors, path)


def empty(path):
    nothing = {"offsets": torch.zeros(1, dtype=torch.int64), "temperatures": torch.zeros(0)}
    save_file({"tokens": torch.zeros(0), "roles": torch.zeros(0), **nothing}, path)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (cut, "cannot be read"),
        (flip, "is damaged"),
        (strip, "is damaged"),
        (drop, "cannot be read"),
        (empty, "holds no tokens"),
        (lambda path: path.write_bytes(b""), "cannot be read"),
        (lambda path: path.write_text("not a shard at all"), "cannot be read"),
        (lambda path: path.unlink(), "cannot be read"),
    ],
)
def test_an_error_names_a_damaged_shard_and_the_fix(folder, damage, problem):
    path = folder.path(0)
    damage(path)
    with pytest.raises(ShardError, match=f"{problem}.*delete it and run the same generation again") as error:
        read_shard(path)
    assert str(path) in str(error.value)


def test_a_failed_write_leaves_nothing_behind(folder, monkeypatch):
    def fail(_, path, __):
        path.write_bytes(b"half of it")
        raise OSError("disk full")

    before = folder.path(0).read_bytes()
    monkeypatch.setattr("arbordraft.training.shards.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        write_shard(pack(CHATS[:1], folder.path(0)))
    assert folder.path(0).read_bytes() == before
    assert len(list(folder.folder.iterdir())) == 3


def test_a_folder_without_shards_is_an_error(tmp_path):
    folder = ShardFolder(tmp_path)
    with pytest.raises(ShardError, match="holds no token shards; generate them first"):
        folder.shards()
    with pytest.raises(ShardError, match=r"no readable manifest.json .*generate into another folder"):
        folder.manifest()


def test_the_same_settings_resume(folder):
    folder.claim(SETTINGS)
    folder.claim({**SETTINGS, "revision": None})  # a setting of None equals a missing one
    assert folder.manifest() == json.loads(json.dumps(SETTINGS))


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({**SETTINGS, "target": "other"}, r"another target: 'tiny' instead of 'other'"),
        ({**SETTINGS, "recipe": {**SETTINGS["recipe"], "seed": 1}}, r"another recipe.seed: 0 instead of 1"),
        (
            {**SETTINGS, "recipe": {"seed": 0, "temperatures": (1.0,)}},
            r"another recipe.temperatures: \[0.0, 1.0\] inst",
        ),
        ({"recipe": SETTINGS["recipe"]}, r"another target: 'tiny' instead of None"),
        ({**SETTINGS, "messages": "digest"}, r"another messages: None instead of 'digest'"),
    ],
)
def test_an_error_names_the_setting_that_differs(folder, changed, problem):
    with pytest.raises(ShardError, match=f"{problem}.*choose another folder, or the old settings"):
        folder.claim(changed)
    folder.claim(SETTINGS)


@pytest.mark.parametrize("text", ["", "{", "[1]"])
def test_a_damaged_manifest_is_an_error(folder, text):
    (folder.folder / MANIFEST).write_text(text)
    with pytest.raises(ShardError, match=r"no readable manifest.json"):
        folder.claim(SETTINGS)


def test_shards_without_a_manifest_are_not_adopted(folder):
    (folder.folder / MANIFEST).unlink()
    with pytest.raises(ShardError, match=r"holds shards but no manifest.json; choose another folder"):
        folder.claim(SETTINGS)

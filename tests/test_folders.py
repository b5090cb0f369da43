"""What is no checkpoint is refused by its name, at once, and with what is missing."""

from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub.errors import RepositoryNotFoundError

import fastbert
from fastbert.folders import check_checkpoint, check_folder


def test_folders_that_are_not_there_are_told_from_names_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for name in ("models", "bert-base-uncased", "google/bert", tmp_path, None, {}):
        check_folder("model", name)
    for name in ("./bert", "models/bert", "google/bert/", "a/b/c", "~/bert", "my bert"):
        with pytest.raises(FileNotFoundError, match=f"^model: there is no folder '{name}'; name"):
            check_folder("model", name)
    for kind in (fastbert.BertModel, fastbert.RobertaForMaskedLM):
        with pytest.raises(OSError, match=r"^pretrained_model_name_or_path: there is no folder"):
            kind.from_pretrained(tmp_path / "bert")


PARTS = {"config.json": "configuration", "model.safetensors": "weights", "vocab.txt": "tokenizer"}


@pytest.mark.parametrize("without", PARTS)
def test_a_folder_says_what_it_lacks(tmp_path, without):
    for name in PARTS.keys() - {without}:
        (tmp_path / name).touch()
    told = rf"^model: .*{tmp_path.name} holds no {PARTS[without]} \([^)]+\); name a folder "
    with pytest.raises(FileNotFoundError, match=told):
        check_checkpoint("model", tmp_path)
    (tmp_path / without).touch()
    check_checkpoint("model", tmp_path)


def test_folders_of_other_kinds(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no configuration .* and no weights .* and no"):
        check_checkpoint("model", tmp_path)
    (tmp_path / "config.json").touch()
    (tmp_path / "model.safetensors").touch()
    check_checkpoint("model", tmp_path, tokenizer=False)
    (tmp_path / "config.yaml").touch()
    with pytest.raises(FileNotFoundError, match=r"`fastbert export .* FOLDER` writes the check"):
        check_checkpoint("model", tmp_path)
    (tmp_path / "modules.json").touch()
    check_checkpoint("model", tmp_path)


def test_the_hub_is_asked_once(tmp_path, monkeypatch):
    """A name may be one of the hub, or a folder that was mistyped."""
    monkeypatch.chdir(tmp_path)
    asked = []

    def answering(*answers):
        def answer(url):
            asked.append(url)
            found = answers[len(asked) - 1]
            if isinstance(found, Exception):
                raise found

        asked.clear()
        monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", answer)

    unknown = RepositoryNotFoundError("404", response=SimpleNamespace(headers={}, request=None))
    answering(unknown)
    with pytest.raises(FileNotFoundError, match=r"no folder 'nowhere', .* hub has no model"):
        check_checkpoint("model", "nowhere")
    answering(RuntimeError("no route"))
    with pytest.raises(FileNotFoundError, match=r"the hub cannot be reached \(no route\); name"):
        check_checkpoint("model", "nowhere", owner="they")
    answering(unknown, None)
    check_checkpoint("model", "nowhere", owner="they")
    assert len(asked) == 2 and "they/nowhere" in asked[1]
    cached = {"they/nowhere": "a path"}
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda n, _: cached.get(n))
    answering()
    check_checkpoint("model", "they/nowhere")


def test_offline_nothing_is_asked():
    """As the tests run."""
    with pytest.raises(FileNotFoundError, match="not asked while HF_HUB_OFFLINE is set"):
        check_checkpoint("model", "nowhere")

"""The collators keep transformers' contract, with masks that are new in every epoch and worker."""

import copy
import pickle

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import DataLoader

import fastbert
from fastbert.testing.proportions import assert_proportion

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused0]"]


def _tokenizer(ordinary, **options):
    vocabulary = {word: i for i, word in enumerate([*WORDS, *ordinary])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    names = ("pad", "unk", "cls", "sep", "mask")
    special = {f"{n}_token": f"[{n.upper()}]" for n in names}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special, **options)


@pytest.fixture(scope="module")
def tokenizer():
    return _tokenizer([f"w{i}" for i in range(300)] + [f"##{i}" for i in range(200)])


@pytest.fixture(scope="module")
def unmarked():
    """A vocabulary that does not say where words begin."""
    return _tokenizer([f"w{i}" for i in range(500)])


def _rows(count, seed=0, low=6, high=506):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, 40, count)
    return [{"input_ids": [2, *rng.integers(low, high, n).tolist(), 3]} for n in lengths]


def test_arguments_are_transformers(tokenizer):
    """The same fields in the same order with the same defaults."""
    from dataclasses import fields

    ours, theirs = (
        [(f.name, f.default) for f in fields(module.DataCollatorForLanguageModeling)]
        for module in (fastbert, transformers)
    )
    assert ours == theirs
    collator = fastbert.DataCollatorForWholeWordMask(tokenizer)
    assert isinstance(collator, transformers.DataCollatorForLanguageModeling)
    assert collator.whole_word_mask


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("kind", ["pt", "np"])
@pytest.mark.parametrize("whole_word_mask", [False, True])
def test_batch(tokenizer, kind, side, whole_word_mask):
    tokenizer = copy.copy(tokenizer)
    tokenizer.padding_side = side
    collator = fastbert.DataCollatorForLanguageModeling(
        tokenizer, whole_word_mask=whole_word_mask, pad_to_multiple_of=8, return_tensors=kind
    )
    rows = _rows(64)
    batch = collator(rows)
    array_class = torch.Tensor if kind == "pt" else np.ndarray
    assert all(isinstance(v, array_class) for v in batch.values())
    plain = tokenizer.pad(rows, pad_to_multiple_of=8, return_tensors="np")
    ids, labels = np.asarray(batch["input_ids"]), np.asarray(batch["labels"])
    assert (np.asarray(batch["attention_mask"]) == plain["attention_mask"]).all()
    assert ids.shape == plain["input_ids"].shape and ids.dtype == labels.dtype == np.int64
    chosen = labels != -100
    assert (labels[chosen] == plain["input_ids"][chosen]).all()
    assert (ids[~chosen] == plain["input_ids"][~chosen]).all()
    assert not chosen[plain["input_ids"] < 5].any()
    assert chosen.any(1).all()


@pytest.mark.parametrize("kind", ["pt", "np"])
def test_whole_words_keep_the_split(tokenizer, kind):
    """transformers replaces whole words by the mask token only; BERT does not."""
    collator = fastbert.DataCollatorForWholeWordMask(tokenizer, seed=0, return_tensors=kind)
    masked = total = 0
    for seed in range(20):
        rows = _rows(200, seed)
        batch = collator(rows)
        chosen = np.asarray(batch["labels"]) != -100
        total += int(chosen.sum())
        masked += int((np.asarray(batch["input_ids"])[chosen] == 4).sum())
    assert_proportion(masked, total, 0.8)


def _pieces(how):
    """Rows of two words of three pieces each, told in one of the ways."""
    ids = [2, *range(10, 16), 3]
    row = {"input_ids": ids}
    if how == "word_ids":
        row["word_ids"] = [None, 0, 0, 0, 1, 1, 1, None]
    elif how == "chinese_ref":
        row["chinese_ref"] = [2, 3, 5, 6]
    else:
        places = [(0, 0), (0, 2), (2, 4), (4, 6), (7, 9), (9, 11), (11, 13), (0, 0)]
        row["offset_mapping"] = places
    short = {k: v[:4] + v[-1:] for k, v in row.items() if k != "chinese_ref"}
    if how == "chinese_ref":
        short["chinese_ref"] = [2, 3]
    return [row, short]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("how", ["offset_mapping", "word_ids", "chinese_ref"])
def test_words_of_an_unmarked_vocabulary(unmarked, how, side):
    tokenizer = copy.copy(unmarked)
    tokenizer.padding_side = side
    collator = fastbert.DataCollatorForWholeWordMask(tokenizer, mlm_probability=0.5, seed=0)
    fates = set()
    for _ in range(60):
        batch = collator(_pieces(how))
        chosen = batch["labels"] != -100
        words = [
            *chosen[0, 1:7].reshape(2, 3),
            chosen[1, 4:7] if side == "left" else chosen[1, 1:4],
        ]
        for word in words:
            assert word.all() or not word.any()
        fates.add(tuple(bool(word[0]) for word in words[:2]))
        assert int(chosen[1].sum()) == 3
    assert fates == {(True, True), (True, False), (False, True)}


def test_words_that_cannot_be_told(unmarked):
    collator = fastbert.DataCollatorForWholeWordMask(unmarked)
    with pytest.raises(ValueError, match="return_offsets_mapping=True"):
        collator([{"input_ids": [2, 10, 11, 3]}])


def test_special_tokens_mask_protects_more(tokenizer):
    collator = fastbert.DataCollatorForLanguageModeling(tokenizer, mlm_probability=1.0)
    row = {"input_ids": [2, 10, 11, 12, 3], "special_tokens_mask": [1, 0, 1, 0, 1]}
    batch = collator([row, {"input_ids": [2, 3], "special_tokens_mask": [0, 0]}])
    assert (batch["labels"] != -100).tolist() == [[False, True, False, True, False], [False] * 5]
    assert "special_tokens_mask" not in batch


def test_random_tokens_are_ordinary(tokenizer):
    collator = fastbert.DataCollatorForLanguageModeling(
        tokenizer, mlm_probability=1.0, mask_replace_prob=0.0, random_replace_prob=1.0
    )
    ids = collator([{"input_ids": [10] * 20_000}])["input_ids"]
    # Neither a special token nor [unused0].
    assert ids.min() == 6 and ids.max() == len(tokenizer) - 1


def test_lists_tensors_and_causal_labels(tokenizer):
    lists = [row["input_ids"] for row in _rows(4)]
    for examples in (lists, [torch.tensor(row) for row in lists]):
        batch = fastbert.DataCollatorForLanguageModeling(tokenizer)(examples)
        assert batch["input_ids"].shape == batch["labels"].shape == (4, max(map(len, lists)))
    ours, theirs = (
        module.DataCollatorForLanguageModeling(tokenizer, mlm=False)(_rows(4))
        for module in (fastbert, transformers)
    )
    assert torch.equal(ours["labels"], theirs["labels"])


def test_arguments_that_are_none(tokenizer):
    with pytest.raises(ValueError, match="mlm_probability should be between"):
        fastbert.DataCollatorForLanguageModeling(tokenizer, mlm_probability=1.5)
    with pytest.raises(ValueError, match="should not exceed 1"):
        fastbert.DataCollatorForLanguageModeling(tokenizer, random_replace_prob=0.5)
    with pytest.raises(ValueError, match="examples is empty"):
        fastbert.DataCollatorForLanguageModeling(tokenizer)([])
    with pytest.raises(ValueError, match="'tf' not recognized"):
        fastbert.DataCollatorForLanguageModeling(tokenizer, return_tensors="tf")(_rows(1))


def test_a_token_added_later_is_known(tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    collator = fastbert.DataCollatorForLanguageModeling(tokenizer, mlm_probability=1.0)
    collator(_rows(2))
    tokenizer.add_special_tokens({"additional_special_tokens": ["[ENTITY]"]})
    batch = collator([{"input_ids": [2, 10, len(tokenizer) - 1, 3]}])
    assert batch["labels"].tolist() == [[-100, 10, -100, -100]]


def _epochs(tokenizer, workers, persistent=False, epochs=3, seed=5):
    """The masked positions of every batch of every epoch; all rows are alike."""
    collator = fastbert.DataCollatorForLanguageModeling(tokenizer, seed=seed)
    rows = [{"input_ids": [2, *range(10, 74), 3]}] * 16
    loader = DataLoader(
        rows, 4, collate_fn=collator, num_workers=workers, persistent_workers=persistent
    )
    return [tuple((b["labels"] != -100).flatten().tolist()) for _ in range(epochs) for b in loader]


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_masks_are_new_in_every_epoch_and_worker(tokenizer, workers, persistent):
    masks = _epochs(tokenizer, workers, persistent)
    assert len(set(masks)) == len(masks) == 12
    # From the collator's seed alone: torch's own has moved on since.
    torch.rand(7)
    assert _epochs(tokenizer, workers, persistent) == masks
    assert not set(_epochs(tokenizer, workers, persistent, epochs=1, seed=6)) & set(masks)


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_a_resumed_run_goes_on_with_its_epoch(tokenizer, workers, persistent):
    rows = [{"input_ids": [2, *range(10, 74), 3]}] * 16

    def epochs(numbers):
        collator = fastbert.DataCollatorForLanguageModeling(tokenizer, seed=5)
        loader = DataLoader(
            rows, 4, collate_fn=collator, num_workers=workers, persistent_workers=persistent
        )
        masks = []
        for number in numbers:
            collator.set_epoch(number)
            masks += [tuple((b["labels"] != -100).flatten().tolist()) for b in loader]
        return masks

    whole = epochs([0, 1, 2])
    assert len(set(whole)) == 12
    assert epochs([1, 2]) == whole[4:] and epochs([2]) == whole[8:]


def test_processes_of_a_run_mask_differently(tokenizer, monkeypatch):
    drawn = set()
    for rank in ("0", "1", "7"):
        monkeypatch.setenv("RANK", rank)
        drawn |= set(_epochs(tokenizer, 0, epochs=1))
    assert len(drawn) == 12


def test_epochs_that_cannot_be_named(tokenizer):
    with pytest.raises(ValueError, match="needs a collator with a seed"):
        fastbert.DataCollatorForLanguageModeling(tokenizer).set_epoch(0)
    with pytest.raises(ValueError, match="0 or more, got -1"):
        fastbert.DataCollatorForLanguageModeling(tokenizer, seed=0).set_epoch(-1)


def test_masks_follow_the_global_seed_without_one(tokenizer):
    for kind, seed in (("pt", torch.manual_seed), ("np", np.random.seed)):
        collator = fastbert.DataCollatorForLanguageModeling(tokenizer, return_tensors=kind)
        drawn = []
        for _ in range(2):
            seed(3)
            drawn += [np.asarray(collator(_rows(8))["labels"]).tolist() for _ in range(2)]
        assert drawn[:2] == drawn[2:] and drawn[0] != drawn[1]


def test_collator_is_copied_and_pickled(tokenizer):
    collator = fastbert.DataCollatorForLanguageModeling(tokenizer, seed=1)
    rows = _rows(8)
    copies = [copy.deepcopy(collator), pickle.loads(pickle.dumps(collator))]
    expected = collator(rows)["labels"]
    for other in copies:
        assert torch.equal(other(rows)["labels"], expected)


def test_trainer_takes_it(tokenizer, tmp_path):
    config = transformers.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
    )
    model = fastbert.BertForMaskedLM(config)
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=3, per_device_train_batch_size=4, report_to=[], use_cpu=True
    )
    trainer = transformers.Trainer(
        model,
        arguments,
        train_dataset=_rows(16),
        data_collator=fastbert.DataCollatorForWholeWordMask(tokenizer, seed=0),
    )
    result = trainer.train()
    assert result.global_step == 3 and 0 < result.training_loss < 10

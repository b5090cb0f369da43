"""datasets: tokenised, formatted and mapped with our models inside."""

import pytest
import torch
import transformers

from fastbert.testing.inputs import small_bert_config
from fastbert.testing.models import assert_packed, model_pair

datasets = pytest.importorskip("datasets")

TEXTS = ["a cat", "the old man and the sea", "rain", "two dogs in the park on a sunny day"]


@pytest.fixture
def tokenizer(real_checkpoint):
    return transformers.AutoTokenizer.from_pretrained(real_checkpoint)


def test_map_with_a_model_inside(tokenizer):
    ours, theirs = model_pair("BertModel", small_bert_config(vocab_size=len(tokenizer)))

    def pooled(model):
        def embed(rows):
            inputs = tokenizer(rows["text"], padding=True, return_tensors="pt")
            with torch.no_grad():
                return {"embedding": model(**inputs).pooler_output.numpy()}

        return embed

    rows = datasets.Dataset.from_dict({"text": TEXTS})
    with assert_packed():
        actual = rows.map(pooled(ours), batched=True, batch_size=2, load_from_cache_file=False)
    expected = rows.map(pooled(theirs), batched=True, batch_size=2, load_from_cache_file=False)
    actual, expected = (
        torch.tensor(r.with_format("numpy")["embedding"][:]) for r in (actual, expected)
    )
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("streaming", [False, True])
def test_loader_over_tokenised_rows(tokenizer, streaming, tmp_path):
    """Rows of a file, read at once or as a stream, through transformers' collator."""
    path = tmp_path / "rows.jsonl"
    datasets.Dataset.from_dict({"text": TEXTS, "labels": [0, 1, 0, 1]}).to_json(path)
    rows = datasets.load_dataset(
        "json",
        data_files=str(path),
        split="train",
        streaming=streaming,
        cache_dir=str(tmp_path / "cache"),
    )
    rows = rows.map(lambda row: tokenizer(row["text"]), remove_columns=["text"])
    loader = torch.utils.data.DataLoader(
        rows, batch_size=2, collate_fn=transformers.DataCollatorWithPadding(tokenizer)
    )
    config = small_bert_config(vocab_size=len(tokenizer), num_labels=2)
    ours, theirs = model_pair("BertForSequenceClassification", config)
    batches = list(loader)
    assert len(batches) == 2
    for batch in batches:
        with torch.no_grad(), assert_packed():
            actual = ours(**batch)
        with torch.no_grad():
            expected = theirs(**batch)
        torch.testing.assert_close(actual.loss, expected.loss, rtol=0, atol=1e-5)
        torch.testing.assert_close(actual.logits, expected.logits, rtol=0, atol=1e-5)

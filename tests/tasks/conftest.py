"""A small checkpoint with a real tokenizer, and rows that it can learn."""

import numpy as np
import pytest
import transformers

from fastbert.testing.inputs import small_bert_config

GOOD, BAD = ("good", "fine", "lovely"), ("bad", "poor", "awful")


@pytest.fixture(scope="session")
def tokenizer(real_checkpoint):
    return transformers.AutoTokenizer.from_pretrained(real_checkpoint)


@pytest.fixture(scope="session")
def checkpoint(tokenizer, tmp_path_factory):
    """A BERT without dropout, random but for its tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoint")
    config = small_bert_config(
        vocab_size=len(tokenizer),
        num_hidden_layers=2,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        # With BERT's 0.02 so small a model learns nothing within seconds.
        initializer_range=0.1,
    )
    transformers.set_seed(0)
    transformers.BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def reviews():
    """Rows whose label one word decides."""
    generator = np.random.default_rng(0)
    rows = []
    for index in range(96):
        words = (BAD, GOOD)[index % 2]
        filling = ["the film was"] * int(generator.integers(1, 4))
        rows.append(
            {
                "text": " ".join([*filling, str(generator.choice(words))]),
                "label": ("negative", "positive")[index % 2],
            }
        )
    return rows

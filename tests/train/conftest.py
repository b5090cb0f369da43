"""A corpus and the settings of a run that takes a second."""

import random

import pytest

from fastbert.data import prepare, train_tokenizer


def _text(seed: int, documents: int) -> str:
    generator = random.Random(seed)
    words = [a + b + c for a in "bdfgk" for b in "aeiou" for c in "lmnr"]
    return "\n\n".join(
        "\n".join(
            " ".join(generator.choices(words, k=generator.randint(3, 12)))
            for _ in range(generator.randint(2, 6))
        )
        for _ in range(documents)
    )


@pytest.fixture(scope="session")
def corpora(tmp_path_factory):
    """Folders of a corpus of three shards and of a held-out one."""
    folder = tmp_path_factory.mktemp("corpora")
    texts = {"train": _text(0, 60), "heldout": _text(1, 10)}
    tokenizer = train_tokenizer(texts.values(), vocab_size=150, min_frequency=1)
    for name, text in texts.items():
        path = folder / f"{name}.txt"
        path.write_text(text)
        pieces = 1 + len(text) // 3 if name == "train" else 1 << 20
        prepare([path], tokenizer, folder / name, workers=1, piece_bytes=pieces, progress=False)
    return folder


@pytest.fixture
def settings(corpora, tmp_path):
    """Of a run of 12 steps in two phases: dropout, two batches a step, several epochs."""
    return {
        "output": str(tmp_path / "run"),
        "precision": "fp32",
        "model": {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "max_position_embeddings": 48,
        },
        "data": {"corpus": str(corpora / "train"), "heldout": str(corpora / "heldout")},
        "phases": [
            {"steps": 9, "max_length": 24, "tokens_per_step": 512, "tokens_per_batch": 256},
            {"steps": 3, "max_length": 48, "tokens_per_step": 768, "tokens_per_batch": 256},
        ],
        "optimizer": {"lr": 2e-3},
        "schedule": {"warmup_steps": 3},
        "evaluation": {"every": 6, "batches": 2},
        "checkpoint": {"every": 4, "keep": 2},
        "log": {"progress": False},
    }

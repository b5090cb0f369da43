"""A training loop of one's own, with transformers' model and with fastbert's, step by step.

    python examples/own_training_loop.py [--steps 10] [--layers 2] [--hidden 128]

Both start from the same weights; without dropout their losses agree, and the padded batches take
fastbert less time. Nothing is downloaded: token ids are drawn by lot.
"""

import argparse
import statistics
import sys
import time

import torch
import transformers

import fastbert

VOCABULARY, LABELS, BATCH, LONGEST = 1000, 4, 32, 96


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=128)
    options = parser.parse_args(argv)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 32,
        intermediate_size=4 * options.hidden,
        num_labels=LABELS,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(0)
    theirs = transformers.BertForSequenceClassification(config)
    ours = fastbert.BertForSequenceClassification(config)
    ours.load_state_dict(theirs.state_dict())
    models = {"transformers": theirs, "fastbert": ours}
    optimizers = {
        name: torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        for name, model in models.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in models}
    print("step  " + "  ".join(f"{name:>12}" for name in models))
    for number in range(1, options.steps + 1):
        batch = drawn(number)
        losses = []
        for name, model in models.items():
            start = time.perf_counter()
            losses.append(step(model, optimizers[name], batch))
            seconds[name].append(time.perf_counter() - start)
        print(f"{number:4}  " + "  ".join(f"{loss:12.6f}" for loss in losses))
    times = {name: statistics.median(values) for name, values in seconds.items()}
    print("ms    " + "  ".join(f"{1000 * value:12.1f}" for value in times.values()))
    print(f"{times['transformers'] / times['fastbert']:.1f} times as fast")
    return 0


def drawn(seed: int) -> dict[str, torch.Tensor]:
    """Texts of 4 to 96 tokens, padded; the label is the first token's."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(LABELS, VOCABULARY, (BATCH, LONGEST), generator=generator)
    ids[:, 0] = torch.randint(LABELS, (BATCH,), generator=generator)
    lengths = torch.randint(4, LONGEST + 1, (BATCH, 1), generator=generator)
    mask = (torch.arange(LONGEST) < lengths).long()
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": ids[:, 0]}


def step(model, optimizer, batch) -> float:
    """One step; its loss."""
    loss = model(**batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Pairs of models, ours and transformers', with the same weights, and batches for them."""

import torch
import transformers

import fastbert
from fastbert.padding import pack
from fastbert.testing.models import assert_packed

from ..harness import interleaved, speedup
from ..shapes import MASKED, SEED, describe


def twins(
    name: str, settings: dict, dtype: torch.dtype = torch.float32, attention: str = "sdpa"
) -> dict:
    """`{"fastbert": model, "transformers": model}`, same weights, transformers' attention as named,
    the family's own dropout (BERT's 0.1)."""
    torch.manual_seed(SEED)
    config = getattr(transformers, name).config_class(**settings)
    config._attn_implementation = attention
    theirs = getattr(transformers, name)(config).to(dtype)
    ours = getattr(fastbert, name)(config).to(dtype)
    ours.load_state_dict(theirs.state_dict())
    return {"fastbert": ours, "transformers": theirs}


def padded(batch: tuple[list[int], int], vocab_size: int) -> dict[str, torch.Tensor]:
    """input_ids and attention_mask of a batch of the given lengths."""
    lengths, longest = batch
    mask = (torch.arange(longest) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(5, vocab_size, mask.shape, generator=torch.Generator().manual_seed(SEED))
    return {"input_ids": ids * mask, "attention_mask": mask}


def with_labels(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Labels on 15 % of the real tokens."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    chance = torch.rand(ids.shape, generator=torch.Generator().manual_seed(SEED + 1))
    return {**inputs, "labels": ids.masked_fill((chance >= MASKED) | (mask == 0), -100)}


def packed(inputs: dict[str, torch.Tensor]) -> dict:
    """The labelled batch in rows without padding, with room for no more."""
    lengths = inputs["attention_mask"].sum(1).tolist()
    sequences = [
        {name: inputs[name][i, :n].tolist() for name in ("input_ids", "labels")}
        for i, n in enumerate(lengths)
    ]
    num_labels = int((inputs["labels"] != -100).sum())
    return pack(
        sequences, num_tokens=sum(lengths), num_sequences=len(lengths), num_labels=num_labels
    )


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Every step's optimizer."""
    return torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)


def loss_step(loss, optimizer, autocast: bool, device: str = "cpu"):
    """One training step of a loss without arguments: forward, backward, update, gradients
    dropped."""

    def step():
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return value

    return step


def check_equal(models: dict, inputs: dict, tolerance: float, counter: str = "bert_model") -> None:
    """Refuses to time models that disagree at real tokens, or that ran on padded rows."""
    real = inputs["attention_mask"] != 0
    with torch.no_grad(), assert_packed(counter):
        ours = models["fastbert"].eval()(**inputs)
    with torch.no_grad():
        theirs = models["transformers"].eval()(**inputs)
    key = "last_hidden_state" if hasattr(ours, "last_hidden_state") else "logits"
    a, b = ours[key][real].double(), theirs[key][real].double()
    error = ((a - b).norm() / b.norm()).item()
    assert error <= tolerance, f"relative error {error:.2e}, allowed {tolerance:.0e}"


def masked_lm_step(model, inputs, optimizer, autocast: bool):
    """A `loss_step` of a labelled batch."""
    device = inputs["input_ids"].device.type
    return loss_step(lambda: model(**inputs).loss, optimizer, autocast, device)


def masked_lm_steps(models: dict, inputs: dict, *, autocast: bool = True) -> dict:
    """A training step of each model on the same labelled batch: fused AdamW, bf16 autocast or the
    models' own dtype."""
    return {
        name: masked_lm_step(model.train(), with_labels(inputs), adamw(model), autocast=autocast)
        for name, model in models.items()
    }


def forwards(models: dict, inputs: dict) -> dict:
    """A forward of each model without gradients, as functions."""

    def forward(model):
        with torch.no_grad():
            return model(**inputs)

    return {name: (lambda m=model: forward(m)) for name, model in models.items()}


def time_both(benchmark, functions: dict, batch, rounds: int, repeats: int = 3) -> None:
    """Times both sides in turn, and fastbert alone.

    Args:
        benchmark: pytest's. functions: of `fastbert` and `transformers`.
        batch: of shapes.py.
        rounds: of the two in turn. repeats: of fastbert alone.
    """
    samples = interleaved(functions, rounds)
    benchmark.extra_info["tokens"] = describe(batch)
    benchmark.extra_info["times_transformers"] = round(
        speedup(samples, "fastbert", "transformers"), 2
    )
    benchmark.pedantic(functions["fastbert"], rounds=repeats)

"""A step of replaced-token detection, ELECTRA-Small, dropout 0.1, fp32 and bf16 autocast: fastbert
against transformers' sdpa and torch's losses, the generator's from the predicted tokens alone."""

import copy

import pytest
import torch
import torch.nn.functional as F
import transformers

from fastbert.models.replaced_tokens import ReplacedTokensModel
from fastbert.testing.models import assert_packed

from ..shapes import BASE, DENSE_8X128, RAGGED_32X128, SEED, TINY
from .twins import adamw, loss_step, packed, padded, time_both, with_labels

BATCHES = {"dense-8x128": DENSE_8X128, "ragged-32x128": RAGGED_32X128}
SMALL = {
    **BASE,
    "embedding_size": 128,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
}
GENERATOR = {"hidden_size": 64, "num_attention_heads": 1, "intermediate_size": 256}
STATE = torch.tensor([SEED, 0])


def _models(settings: dict) -> dict:
    """Generator and discriminator of both sides, with the same weights and shared embeddings."""
    torch.manual_seed(SEED)
    configs = [transformers.ElectraConfig(**{**settings, **more}) for more in (GENERATOR, {})]
    ours = ReplacedTokensModel(*configs)
    theirs = torch.nn.ModuleList()
    for kind, part in zip(("MaskedLM", "PreTraining"), ours.parts, strict=True):
        config = copy.deepcopy(part.config)
        config._attn_implementation = "sdpa"
        theirs.append(getattr(transformers, f"ElectraFor{kind}")(config))
        theirs[-1].load_state_dict(part.state_dict())
    theirs[1].electra.embeddings = theirs[0].electra.embeddings
    return {"fastbert": ours.train(), "transformers": theirs.train()}


def _plain_loss(models, batch: dict, corrupted_ids=None) -> torch.Tensor:
    """Both losses by torch's functions; ids are sampled where none are given."""
    generator, discriminator = models
    mask, labels, ids = batch["attention_mask"], batch["labels"], batch["input_ids"]
    chosen = labels != -100
    states = generator.electra(input_ids=ids, attention_mask=mask).last_hidden_state[chosen]
    logits = generator.generator_lm_head(generator.generator_predictions(states)).float()
    original = torch.where(chosen, labels, ids)
    if corrupted_ids is None:
        corrupted_ids = original.clone()
        corrupted_ids[chosen] = torch.multinomial(logits.detach().softmax(-1), 1)[:, 0]
    replaced = (corrupted_ids != original).long()
    judged = discriminator(input_ids=corrupted_ids, attention_mask=mask, labels=replaced)
    return F.cross_entropy(logits, labels[chosen]) + 50 * judged.loss


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("batch", BATCHES)
def test_replaced_tokens_step(benchmark, tiny, batch, dtype):
    settings = {**SMALL, "num_hidden_layers": 2, "vocab_size": 99} if tiny else SMALL
    chosen = TINY if tiny else BATCHES[batch]
    models = _models(settings)
    ours, theirs = models["fastbert"], models["transformers"]
    inputs = with_labels(padded(chosen, settings["vocab_size"]))
    rows = packed(inputs)
    with torch.no_grad():
        outputs = ours.eval()(**rows, rng_state=STATE)
        ids = inputs["input_ids"].clone()
        ids[inputs["attention_mask"] == 1] = outputs.corrupted_ids[0]
        plain = _plain_loss(theirs.eval(), inputs, ids)
    torch.testing.assert_close(outputs.loss, plain, rtol=1e-4, atol=1e-4)
    ours.train()
    theirs.train()
    autocast = dtype == "bf16"
    steps = {
        "fastbert": loss_step(lambda: ours(**rows, rng_state=STATE).loss, adamw(ours), autocast),
        "transformers": loss_step(lambda: _plain_loss(theirs, inputs), adamw(theirs), autocast),
    }
    with assert_packed("electra_model"):
        time_both(benchmark, steps, chosen, 1 if tiny else 5, repeats=2)

"""A distillation step, 12 to 6 layers, dropout 0.1, fp32 and bf16 autocast: fastbert against
transformers' sdpa and torch's losses on the logits of the predicted tokens."""

import copy

import pytest
import torch
import torch.nn.functional as F
import transformers

import fastbert
from fastbert.models.distillation import Teaching, spaced_layers, student_of
from fastbert.testing.counters import assert_ran
from fastbert.testing.models import assert_packed

from ..shapes import BASE, DENSE_8X128, RAGGED_32X128, SEED, TINY
from .twins import adamw, loss_step, packed, padded, time_both, with_labels

BATCHES = {"dense-8x128": DENSE_8X128, "ragged-32x128": RAGGED_32X128}
# A quarter of BERT-base's width and its vocabulary.
SMALL = {**BASE, "hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768}
TINY_SIZE = {**BASE, "hidden_size": 24, "num_hidden_layers": 2, "vocab_size": 99}


def _models(settings: dict) -> dict:
    """Teacher and student of both sides, with the same weights."""
    torch.manual_seed(SEED)
    teacher = fastbert.BertForMaskedLM(transformers.BertConfig(**settings)).eval()
    teacher.requires_grad_(False)
    num_layers = settings["num_hidden_layers"]
    student = student_of(
        Teaching(teacher),
        spaced_layers(num_layers // 2, num_layers),
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
    )
    theirs = []
    for model in (teacher, student):
        config = copy.deepcopy(model.config)
        config._attn_implementation = "sdpa"
        theirs.append(transformers.BertForMaskedLM(config))
        theirs[-1].load_state_dict(model.state_dict())
    return {"fastbert": student, "transformers": (theirs[0].eval(), theirs[1].train())}


def _plain_loss(models, batch: dict) -> torch.Tensor:
    """The three losses by torch's functions, with the published weights."""
    teacher, student = models
    inputs = {k: batch[k] for k in ("input_ids", "attention_mask")}
    chosen, real = batch["labels"] != -100, batch["attention_mask"] != 0
    states = student.bert(**inputs).last_hidden_state
    logits = student.cls(states[chosen]).float()
    with torch.no_grad():
        expected = teacher.bert(**inputs).last_hidden_state
        targets = F.softmax(teacher.cls(expected[chosen]).float() / 2, -1)
    soft = F.kl_div(F.log_softmax(logits / 2, -1), targets, reduction="batchmean") * 4
    hard = F.cross_entropy(logits, batch["labels"][chosen])
    cosine = F.cosine_similarity(states[real].float(), expected[real].float(), dim=-1)
    return 5 * soft + 2 * hard + (1 - cosine).mean()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("batch", BATCHES)
def test_distillation_step(benchmark, tiny, batch, dtype):
    settings = TINY_SIZE if tiny else SMALL
    chosen = TINY if tiny else BATCHES[batch]
    models = _models(settings)
    student, theirs = models["fastbert"], models["transformers"]
    inputs = with_labels(padded(chosen, settings["vocab_size"]))
    rows = packed(inputs)
    with torch.no_grad():
        theirs[1].eval()
        ours, plain = student.eval()(**rows).loss, _plain_loss(theirs, inputs)
        theirs[1].train()
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)
    student.train()
    steps = {
        "fastbert": loss_step(lambda: student(**rows).loss, adamw(student), dtype == "bf16"),
        "transformers": loss_step(
            lambda: _plain_loss(theirs, inputs), adamw(theirs[1]), dtype == "bf16"
        ),
    }
    with assert_packed(), assert_ran("mlm_distillation_bwd", "cpu"):
        time_both(benchmark, steps, chosen, 1 if tiny else 5, repeats=2)

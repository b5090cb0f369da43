"""A sentence's outputs are the same bits alone and in any batch, order, padding, thread count."""

import pytest
import torch

import fastbert
from fastbert import extension
from fastbert.testing.compare import assert_bitwise_equal
from fastbert.testing.inputs import small_bert_config
from fastbert.testing.models import assert_packed

LENGTHS = (7, 1, 40, 33, 12, 64, 5)
HEADS = {
    "BertModel": ("last_hidden_state", "pooler_output"),
    "BertForMaskedLM": ("logits",),
    "BertForPreTraining": ("prediction_logits", "seq_relationship_logits"),
    "BertForSequenceClassification": ("logits",),
    "BertForTokenClassification": ("logits",),
    "BertForQuestionAnswering": ("start_logits", "end_logits"),
}

POOLED = {"pooler_output", "seq_relationship_logits"}


def _batch(sentences, side):
    longest = max(len(s) for s in sentences)
    ids = torch.zeros(len(sentences), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, sentence in enumerate(sentences):
        place = slice(0, len(sentence)) if side == "right" else slice(longest - len(sentence), None)
        ids[row, place] = sentence
        mask[row, place] = 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions}


def _of_sentences(model, sentences, names, side="right"):
    """Each sentence's outputs at its own tokens, or its row where there is one for all."""
    batch = _batch(sentences, side)
    with torch.no_grad(), assert_packed():
        outputs = model(**batch)
    return [
        {
            name: outputs[name][row][batch["attention_mask"][row] != 0]
            if outputs[name].shape[:2] == batch["input_ids"].shape
            else outputs[name][row]
            for name in names
        }
        for row in range(len(sentences))
    ]


@pytest.fixture(params=["bf16", "fp32", "autocast"])
def precision(request):
    if not extension.cpu_isas():
        pytest.skip("torch's matmul depends on the number of rows; the compiled part is not built")
    with torch.autocast("cpu", torch.bfloat16, enabled=request.param == "autocast"):
        yield torch.bfloat16 if request.param == "bf16" else torch.float32


@pytest.mark.parametrize("head", HEADS)
def test_batch_invariance(head, precision):
    config = small_bert_config(hidden_size=96, intermediate_size=200, num_labels=2)
    model = getattr(fastbert, head)(config).eval().to(precision)
    sentences = [torch.randint(1, config.vocab_size, (n,)) for n in LENGTHS]
    alone = [_of_sentences(model, [s], HEADS[head])[0] for s in sentences]
    order = torch.randperm(len(sentences)).tolist()
    before = torch.get_num_threads()
    # Under left padding the pooler reads padding, as transformers' does.
    pooled = head == "BertForSequenceClassification" or set(HEADS[head]) & POOLED
    sides = ("right", "right" if pooled else "left", "right")
    for threads, side, chosen in zip((1, 2, 3), sides, (order, order[:3], order), strict=True):
        torch.set_num_threads(threads)
        together = _of_sentences(model, [sentences[i] for i in chosen], HEADS[head], side)
        for index, outputs in zip(chosen, together, strict=True):
            for name, value in outputs.items():
                assert_bitwise_equal(value, alone[index][name], f"{name} of sentence {index}")
    torch.set_num_threads(before)

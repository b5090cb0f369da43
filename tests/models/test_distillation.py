"""A student's losses and gradients against transformers' models in float64."""

import copy

import pytest
import torch
import torch.nn.functional as F
import transformers

import fastbert
from fastbert.models.distillation import Teaching, spaced_layers, student_of
from fastbert.padding import pack
from fastbert.testing.compare import assert_bitwise_equal, assert_close_to_oracle, compare_gradients
from fastbert.testing.counters import assert_ran
from fastbert.testing.inputs import small_bert_config
from fastbert.testing.models import assert_packed, gradients, lively_

LAYERS = [0, 3]
LOSSES = ("loss", "soft_loss", "mlm_loss", "cosine_loss")


def _teaching(**options) -> Teaching:
    torch.manual_seed(0)
    config = small_bert_config()
    config.num_hidden_layers = 4
    teacher = fastbert.BertForMaskedLM(config)
    lively_(teacher, 1)
    return Teaching(teacher.eval().requires_grad_(False), **options)


def _student(teaching, dropout=0.0, moved=True):
    student = student_of(
        teaching, LAYERS, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout
    )
    if moved:
        # A student that has learned something else than its teacher.
        lively_(student, 2)
    return student


def _batch(vocab_size: int, seed: int = 0) -> tuple[dict, list[dict]]:
    """A packed batch with idle rows, and its sequences."""
    generator = torch.Generator().manual_seed(seed)
    sequences = []
    for length in (9, 14, 5):
        ids = torch.randint(vocab_size, (length,), generator=generator)
        labels = ids.masked_fill(torch.rand(length, generator=generator) > 0.4, -100)
        sequences.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    batch = pack(sequences, num_tokens=40, num_sequences=5, num_labels=20)
    return batch, sequences


def _plain(student, teacher, sequences, teaching, dtype) -> dict[str, torch.Tensor]:
    """The losses, by transformers' models on one sequence after the other."""
    models = []
    for model in (student, teacher):
        theirs = transformers.BertForMaskedLM(copy.deepcopy(model.config))
        theirs.load_state_dict(model.state_dict())
        models.append(theirs.to(dtype).eval())
    soft, hard, apart = [], [], []
    heat = teaching.temperature
    for sequence in sequences:
        ids, labels = (torch.tensor([sequence[k]]) for k in ("input_ids", "labels"))
        ours, taught = (m(input_ids=ids, output_hidden_states=True) for m in models)
        logits, targets = ours.logits[0], taught.logits[0].detach()
        chosen = labels[0] != -100
        hard.append(F.cross_entropy(logits[chosen], labels[0][chosen], reduction="none"))
        q = F.log_softmax(logits[chosen] / heat, -1)
        p = F.softmax(targets[chosen] / heat, -1)
        soft.append(heat**2 * F.kl_div(q, p, reduction="none").sum(-1))
        states = ours.hidden_states[-1][0], taught.hidden_states[-1][0].detach()
        apart.append(1 - F.cosine_similarity(*states, dim=-1))
    losses = [torch.cat(values).mean() for values in (soft, hard, apart)]
    weights = (teaching.soft_weight, teaching.mlm_weight, teaching.cosine_weight)
    total = sum(w * x for w, x in zip(weights, losses, strict=True))
    total.backward()
    return dict(zip(LOSSES, (total, *losses), strict=True)), gradients(models[0])


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 1.0, "soft_weight": 0.5, "mlm_weight": 0.0, "cosine_weight": 3.0}],
    ids=["published weights", "others"],
)
def test_losses_and_gradients(options):
    teaching = _teaching(**options)
    student = _student(teaching)
    batch, sequences = _batch(student.config.vocab_size)
    with assert_packed(), assert_ran("mlm_distillation_bwd", "cpu"):
        outputs = student(**batch)
        outputs.loss.backward()
    results = [
        _plain(student, teaching.teacher, sequences, teaching, dtype)
        for dtype in (torch.float64, torch.float32)
    ]
    for name in LOSSES:
        expected, plain = (losses[name] for losses, _ in results)
        assert_close_to_oracle(outputs[name], expected, plain, name, op="model")
    oracle, plain = (named for _, named in results)
    named = gradients(student)
    compare_gradients(named, oracle, plain, op="model")
    assert not any(p.grad is not None for p in teaching.teacher.parameters())


def test_losses_under_autocast():
    """As the step calls it, in bf16: near the losses in fp32."""
    student = _student(_teaching())
    batch, _ = _batch(student.config.vocab_size)
    wide = student(**batch)
    with torch.autocast("cpu", torch.bfloat16):
        narrow = student(**batch)
    for name in LOSSES:
        assert narrow[name].dtype == torch.float32
        torch.testing.assert_close(narrow[name], wide[name], rtol=0.05, atol=0.01)


def test_shares_of_a_step_add_up():
    """Two batches with the number of labels of both: means weighted by their labels."""
    student = _student(_teaching())
    batches = [_batch(student.config.vocab_size, seed)[0] for seed in (0, 1)]
    counts = [(batch["labels"] != -100).sum() for batch in batches]
    assert counts[0] != counts[1]
    alone = [student(**batch) for batch in batches]
    shares = [student(**batch, num_items_in_batch=sum(counts)) for batch in batches]
    for name in LOSSES:
        mean = sum(x[name] * n for x, n in zip(alone, counts, strict=True)) / sum(counts)
        torch.testing.assert_close(sum(share[name] for share in shares), mean)


def test_student_begins_as_its_teacher():
    teaching = _teaching()
    teacher, student = teaching.teacher, _student(teaching, dropout=0.25, moved=False)
    expected = {
        name.replace(f"layer.{number}.", f"layer.{place}.") if "layer." in name else name: value
        for name, value in teacher.state_dict().items()
        for place, number in enumerate(LAYERS)
        if "layer." not in name or f"layer.{number}." in name
    }
    assert student.state_dict().keys() == expected.keys()
    for name, value in student.state_dict().items():
        assert_bitwise_equal(value, expected[name], name)
        assert value.data_ptr() != expected[name].data_ptr()
    assert student.training and student.config.num_hidden_layers == 2
    assert student.config.hidden_dropout_prob == student.bert.embeddings.dropout.p == 0.25
    assert teacher.config.num_hidden_layers == 4 and teacher.config.hidden_dropout_prob != 0.25
    decoder, words = student.decoder_layer().weight, student.bert.embeddings.word_embeddings.weight
    assert decoder is words


def test_teacher_has_no_dropout():
    """The student's dropout changes its losses; a copy of the teacher in evaluation has none."""
    teaching = _teaching()
    student = student_of(
        teaching, range(4), hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.3
    )
    batch, _ = _batch(student.config.vocab_size)
    state = torch.tensor([1, 2])
    first, second = (student(**batch, rng_state=state) for _ in range(2))
    assert_bitwise_equal(first.loss, second.loss, "loss")
    assert first.soft_loss > 1e-3 and first.cosine_loss > 1e-3
    quiet = student.eval()(**batch, rng_state=state)
    torch.testing.assert_close(quiet.soft_loss, torch.tensor(0.0), rtol=0, atol=1e-5)
    torch.testing.assert_close(quiet.cosine_loss, torch.tensor(0.0), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("num_layers", "of", "expected"),
    [(6, 12, [0, 2, 4, 7, 9, 11]), (2, 4, [0, 3]), (1, 12, [0]), (3, 3, [0, 1, 2])],
)
def test_layers_are_spaced(num_layers, of, expected):
    assert spaced_layers(num_layers, of) == expected

"""The benchmark of fine-tuning runs on a few rows, and its table holds what was measured."""

import json

import pytest

from benchmarks import finetuning

SENTENCES = ("a dog runs", "a hound is running", "rates rose again", "she plays the violin")


@pytest.fixture
def similarities(tmp_path):
    pairs = [(first, second) for second in range(4) for first in range(4)]
    lines = [f"{SENTENCES[i]}\t{SENTENCES[j]}\t{5 - abs(i - j)}" for i, j in pairs]
    path = tmp_path / "sts.tsv"
    path.write_text("\n".join(["sentence1\tsentence2\tscore", *lines, ""]))
    return path


def test_every_other_pair_is_trained_on_with_scores_of_at_most_1(similarities):
    train, test = finetuning._similarities(similarities, 8)
    assert len(train) == len(test) == 8
    assert {row["score"] for row in train + test} == {0.4, 0.6, 0.8, 1.0}
    firsts = [row["sentence1"] for row in train]
    assert firsts == [SENTENCES[i % 4] for i in range(0, 16, 2)]
    assert [len(part) for part in finetuning._similarities(similarities, 3)] == [3, 3]


def test_it_measures_both(similarities, real_checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(finetuning, "ROUNDS", 1)
    arguments = f"--data {tmp_path} --model {real_checkpoint} --sts {similarities} --seeds 1"
    arguments += f" --rows 8 --epochs 1 --tasks sts --json {tmp_path}/out.json"
    finetuning.main(arguments.split())
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["rows"].keys() == {"sts"}
    sts = record["rows"]["sts"]
    assert all(0.5 < sts[name] <= 1 for name in finetuning.IMPLEMENTATIONS)
    assert sts["training"] > 0 and sts["prediction"] > 0
    printed = capsys.readouterr().out
    assert f"| sts | spearman | {sts['transformers']:.3f} | {sts['fastbert']:.3f} | – |" in printed


def test_the_summary_holds_or_does_not():
    def runs(ours):
        theirs = (0.80, 0.82, 0.81)
        speeds = ({"training": 10, "prediction": 30}, {"training": 20, "prediction": 45})
        return [
            {"transformers": {"metric": t, **speeds[0]}, "fastbert": {"metric": o, **speeds[1]}}
            for t, o in zip(theirs, ours, strict=True)
        ]

    row = finetuning.summary(runs((0.81, 0.80, 0.82)))
    assert row["holds"] and row["training"] == 2 and row["prediction"] == 1.5
    assert not finetuning.summary(runs((0.70, 0.72, 0.71)))["holds"]


def test_a_task_that_is_not_there_is_told(capsys):
    with pytest.raises(SystemExit):
        finetuning.main(["--data", ".", "--model", "m", "--tasks", "sts,poems"])
    assert "poems, sts; there are sentiment, ner, qa, retrieval, and sts with --sts" in (
        capsys.readouterr().err
    )

"""The pictures show the numbers they are made of."""

import matplotlib.figure
import numpy as np
import pytest

from fastbert.tasks.classification import Classification, ClassificationSettings
from fastbert.tasks.plots import calibration, draw_calibration, draw_confusion, draw_learning

HISTORY = [
    {"epoch": 1.0, "train_loss": 0.9, "loss": 0.7, "accuracy": 0.5},
    {"epoch": 2.0, "train_loss": 0.4, "loss": 0.6, "accuracy": 0.75},
]


@pytest.fixture
def drawn(monkeypatch):
    """Figures as they are saved."""
    figures = []
    save = matplotlib.figure.Figure.savefig

    def recorded(self, *args, **kwargs):
        figures.append(self)
        return save(self, *args, **kwargs)

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", recorded)
    return figures


def test_confusion(drawn, tmp_path):
    draw_confusion(list("aabbb"), list("abbba"), list("abc"), tmp_path / "c.png")
    axes = drawn[0].axes[0]
    assert [text.get_text() for text in axes.texts] == list("110120000")
    shares = axes.images[0].get_array()
    np.testing.assert_allclose(shares, [[0.5, 0.5, 0], [1 / 3, 2 / 3, 0], [0, 0, 0]])
    assert [label.get_text() for label in axes.get_yticklabels()] == list("abc")
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_many_labels_are_shaded_only(drawn, tmp_path):
    labels = [str(number) for number in range(77)]
    draw_confusion(labels, labels, labels, tmp_path / "c.png")
    assert not drawn[0].axes[0].texts


def test_calibration(drawn, tmp_path):
    confidence, right = [0.55, 0.58, 0.95, 1.0], [True, False, True, True]
    means, shares, counts = calibration(confidence, right)
    np.testing.assert_allclose(means, [0.565, 0.975])
    np.testing.assert_allclose(shares, [0.5, 1])
    assert counts.tolist() == [2, 2]
    error = draw_calibration(confidence, right, tmp_path / "c.png")
    assert error == pytest.approx((0.065 + 0.025) / 2)
    line = drawn[0].axes[0].lines[1]
    np.testing.assert_allclose(line.get_xydata(), [[0.565, 0.5], [0.975, 1]])


def test_learning(drawn, tmp_path):
    draw_learning(HISTORY, "accuracy", tmp_path / "c.png")
    losses, metric = drawn[0].axes
    assert [line.get_ydata().tolist() for line in losses.lines] == [[0.9, 0.4], [0.7, 0.6]]
    assert metric.lines[0].get_ydata().tolist() == [0.5, 0.75]


def test_outcomes_of_several_labels_are_single_probabilities():
    task = Classification(ClassificationSettings(problem="multi"), ["a", "b"])
    found = task.outcomes(
        [{"label": "b"}, {"label": "a;b"}],
        [{"scores": {"a": 0.2, "b": 0.9}}, {"scores": {"a": 0.4, "b": 0.3}}],
    )
    assert not found.truth
    assert found.confidence == [0.2, 0.9, 0.4, 0.3]
    assert found.right == [False, True, True, True]

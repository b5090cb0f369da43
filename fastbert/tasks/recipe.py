"""How a model is fine-tuned: defaults that are known to hold up; `trainers` carries it out.

Sources: bias-corrected AdamW, a tenth of the steps as warm-up and a linear fall: Mosbach et al.
2021, "On the stability of fine-tuning BERT", section 6; rates by layer as in
`fastbert.optim.layer_decay`.
"""

from dataclasses import dataclass

from fastbert.tasks.tables import TaskError


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """
    Attributes:
        epochs: passes over the training rows.
        batch_size: features of a batch.
        learning_rate: of the head.
        layer_decay: factor on it from layer to layer down.
        warmup: share of the steps.
        weight_decay: of matrices.
        patience: epochs without a better metric before stopping; None: never.
        seed: of the head, the order, dropout and held-out rows; equal ones give equal runs.
        bf16: autocast to it.
        accumulation: batches of a step.
        accelerated: False trains transformers' own model.
        progress: show a bar.
    """

    epochs: float = 3
    batch_size: int = 32
    learning_rate: float = 5e-5
    layer_decay: float = 0.95
    warmup: float = 0.1
    weight_decay: float = 0.01
    patience: int | None = 2
    seed: int = 42
    bf16: bool = False
    accumulation: int = 1
    accelerated: bool = True
    progress: bool = False

    def __post_init__(self):
        for name, low in (("epochs", 0), ("learning_rate", 0), ("batch_size", 0)):
            if not getattr(self, name) > low:
                raise TaskError(f"{name} must be above {low}, got {getattr(self, name)}")
        if not 0 <= self.warmup < 1:
            raise TaskError(f"warmup must lie in [0, 1), got {self.warmup}")
        if self.patience is not None and self.patience < 1:
            raise TaskError(f"patience must be at least 1, got {self.patience}")
        if self.accumulation < 1:
            raise TaskError(f"accumulation must be at least 1, got {self.accumulation}")

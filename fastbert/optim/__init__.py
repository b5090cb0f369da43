"""Optimizers for large batches and low precision, and the groups that decay."""

from fastbert.optim.groups import decay_groups
from fastbert.optim.lamb import LAMB
from fastbert.optim.layer_decay import layer_decay_groups
from fastbert.optim.stable_adamw import StableAdamW

__all__ = ["LAMB", "StableAdamW", "decay_groups", "layer_decay_groups"]

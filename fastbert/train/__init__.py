"""Training: a step of fixed shapes that is one CUDA graph."""

from fastbert.train.graphed_step import GraphedStep, StepReport

__all__ = ["GraphedStep", "StepReport"]

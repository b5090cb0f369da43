"""Training: a step of fixed shapes that is one CUDA graph, and pretraining."""

from fastbert.lazy import exports

# Settings and the help of commands need no torch, which takes seconds.
_EXPORTS = {"GraphedStep": ".graphed_step", "StepReport": ".graphed_step"}

__all__ = list(_EXPORTS)
__getattr__, __dir__ = exports(__name__, _EXPORTS)

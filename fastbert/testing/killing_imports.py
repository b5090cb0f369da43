"""What the server of `fastbert.testing.killing` imports once for all runs."""

import transformers

import fastbert
from fastbert.train import exporting, pretraining

# Lazy modules are loaded here, not in each run.
LOADED = (
    fastbert.BertForMaskedLM,
    fastbert.BertForPreTraining,
    transformers.AutoTokenizer,
    exporting.export,
    pretraining.pretrain,
)

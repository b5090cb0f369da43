"""From a run to a folder that transformers loads."""

from pathlib import Path

import transformers
from transformers import AutoTokenizer

import fastbert
from fastbert.train.checkpoints import CheckpointError, Checkpoints
from fastbert.train.config import ConfigError, DistillConfig, read_run
from fastbert.train.distilbert import as_distilbert


def export(
    run: str | Path,
    output: str | Path,
    checkpoint: str | None = None,
    *,
    average: bool = False,
) -> str:
    """Writes config, weights (safetensors, fp32) and tokenizer of a checkpoint.

    `transformers.AutoModelForMaskedLM.from_pretrained(output)` then has the run's logits. A run on
    pairs keeps its next-sentence head, which `BertForPreTraining` reads. A distillation is
    written as the family its settings name.

    Args:
        run: folder of a run.
        output: folder to write, new or empty.
        checkpoint: such as step-2000; default: the last one.
        average: the averaged weights, which a run with `average_decay` has.

    Returns:
        The checkpoint's name.

    Raises:
        ConfigError: no run there, one without averages, or output holds something.
        CheckpointError: no checkpoint, or a damaged one.
    """
    run, output = Path(run), Path(output)
    if not (run / "config.yaml").is_file():
        raise ConfigError(f"{run} is not a run: it has no config.yaml")
    if output.is_dir() and any(output.iterdir()):
        raise ConfigError(f"{output} is not empty; choose a new folder")
    settings = read_run(run)
    if average and settings.average_decay is None:
        raise ConfigError(f"{run} kept no averages: it has no average_decay; leave out average")
    checkpoints = Checkpoints(run / "checkpoints", settings.checkpoint.keep)
    names = checkpoints.names()
    if not names:
        raise CheckpointError(f"{run} has no checkpoint yet")
    name = checkpoint or names[-1]
    pairs = settings.data.sequences != "packed"
    head = fastbert.BertForPreTraining if pairs else fastbert.BertForMaskedLM
    model = head(transformers.BertConfig.from_pretrained(run))
    # Read in place; averages have a name for each parameter, weights for each place it is used in.
    weights = {key: p.detach() for key, p in model.named_parameters()}
    checkpoints.verify(name)
    checkpoints.load(name, {"average": weights} if average else {"model": model.state_dict()})
    if isinstance(settings, DistillConfig) and settings.model.family == "distilbert":
        model = as_distilbert(model)
    model.save_pretrained(output)
    AutoTokenizer.from_pretrained(run / "tokenizer").save_pretrained(output)
    return name

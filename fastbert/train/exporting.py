"""From a run to a folder that transformers loads."""

from pathlib import Path

import transformers
from torch import nn
from transformers import AutoTokenizer

import fastbert
from fastbert.train.checkpoints import CheckpointError, Checkpoints
from fastbert.train.config import ConfigError, DistillConfig, PretrainConfig, read_run
from fastbert.train.distilbert import as_distilbert
from fastbert.train.replaced_tokens import GENERATOR, pair_of_run, save_pair


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
    written as the family its settings name. Of replaced-token detection output is the
    discriminator, which `AutoModelForPreTraining` loads, and output/generator the generator.

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
    model = _model_of(run, settings)
    # Read in place; averages have a name for each parameter, weights for each place it is used in.
    weights = {key: p.detach() for key, p in model.named_parameters()}
    checkpoints.verify(name)
    checkpoints.load(name, {"average": weights} if average else {"model": model.state_dict()})
    if isinstance(settings, DistillConfig) and settings.model.family == "distilbert":
        model = as_distilbert(model)
    tokenizer = AutoTokenizer.from_pretrained(run / "tokenizer")
    if settings.objective == "replaced_tokens":
        save_pair(model, output)
        tokenizer.save_pretrained(output / GENERATOR)
    else:
        model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    return name


def _model_of(run: Path, settings: PretrainConfig) -> nn.Module:
    """What was trained, before its weights are loaded."""
    if settings.objective == "replaced_tokens":
        return pair_of_run(run, settings)
    pairs = settings.data.sequences != "packed"
    head = fastbert.BertForPreTraining if pairs else fastbert.BertForMaskedLM
    return head(transformers.BertConfig.from_pretrained(run))

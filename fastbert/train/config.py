"""What a pretraining run is made of: typed settings, read from YAML, all checked before any work.

A file holds only what differs from the defaults below; the command line overrides the file.
"""

import dataclasses
import difflib
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fastbert.folders import check_checkpoint

READY = Path(__file__).parent / "configs"


class ConfigError(ValueError):
    """Settings that cannot be used, with the remedy."""


@dataclass(frozen=True)
class ModelConfig:
    """The model, by transformers' names; the vocabulary is the corpus' tokenizer's."""

    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    max_position_embeddings: int = 512
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    vocab_multiple_of: int = 1
    """The vocabulary is filled up to a multiple of this; 64 suits GPUs."""
    init_from: str | None = None
    """Folder of a transformers checkpoint to begin with; its config then decides all but dropout.
    """
    embedding_size: int | None = None
    """Of the objective replaced_tokens: width of the embeddings; unset: hidden_size."""
    family: Literal["electra", "deberta-v2", "deberta"] | None = None
    """Of the objective replaced_tokens, by transformers' model types (deberta-v2 is v3's, too);
    unset: init_from's, or electra."""
    position_buckets: int | None = None
    """Of deberta-v2: logarithmic buckets of distances to each side; unset: half of
    max_position_embeddings."""


@dataclass(frozen=True)
class GeneratorConfig:
    """The second model of the objective replaced_tokens, which replaces the tokens; see
    `fastbert.models.replaced_tokens`."""

    size: float = 0.25
    """Its share of the model's hidden size, heads and intermediate size."""
    num_hidden_layers: int | None = None
    """Unset: the model's."""
    init_from: str | None = None
    """Folder of a transformers checkpoint to begin with; its config then decides the sizes."""
    enhanced_mask_decoder: bool | None = None
    """DeBERTa's, whose last layer alone knows absolute positions; unset: yes, where the input of
    init_from has none."""
    embeddings: Literal["shared", "disentangled", "separate"] = "shared"
    """ELECTRA's sharing; DeBERTaV3's, whose gradients stay apart; none."""
    detection_weight: float = 50.0
    """Of the model's loss beside the generator's."""


@dataclass(frozen=True)
class MaskingConfig:
    """Which tokens are predicted; see `fastbert.data.Masking`."""

    rate: float = 0.15
    final_rate: float | None = None
    """Rate at the last step, approached linearly from `rate`."""
    mask_share: float = 0.8
    random_share: float = 0.1
    unit: Literal["token", "word", "span"] = "token"
    selection: Literal["bernoulli", "rounded"] = "bernoulli"
    fixed_count: int | None = None
    """Exactly so many in every batch; the last, smaller batch of a shard is then left out."""
    span_lengths: Literal["inverse", "geometric"] = "inverse"
    """ALBERT's law of the lengths or SpanBERT's."""
    dupe_factor: int | None = None
    """Static masking with so many sets of masks; unset: new masks in every epoch."""


@dataclass(frozen=True)
class DataConfig:
    """Where sequences come from."""

    corpus: str = ""
    """Folder written by `fastbert data prepare`."""
    heldout: str | None = None
    """Another such folder, by the same tokenizer, for evaluation."""
    sequences: Literal["packed", "next_sentence", "sentence_order"] = "packed"
    """Full sentences as RoBERTa; pairs as BERT or ALBERT, whose loss is added."""
    cross_documents: bool = True
    """Packed sequences go on into the next document."""
    short_share: float = 0.1
    """Share of pairs with a shorter target length."""
    masking: MaskingConfig = field(default_factory=MaskingConfig)
    labels_per_batch: int | None = None
    """Room for predicted tokens in a batch; unset: far above what the rate gives."""
    sequences_per_batch: int | None = None
    """Room for sequences in a batch; unset: far above what their mean length gives."""


@dataclass(frozen=True)
class Phase:
    """Steps with sequences of one length; BERT's recipe has two, a length warm-up more."""

    steps: int = 1_000_000
    max_length: int = 512
    tokens_per_step: int = 131_072
    """Tokens of an optimizer step, of all processes and accumulated batches together."""
    tokens_per_batch: int = 16_384
    """Tokens one process computes at a time; must divide `tokens_per_step`."""


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer; biases and norms never decay."""

    name: Literal["adamw", "lamb", "stable_adamw"] = "adamw"
    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 0.01
    max_grad_norm: float | None = 1.0


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate: up linearly, then down to `final_share` of it at the last step."""

    kind: Literal["linear", "cosine", "poly", "wsd"] = "linear"
    warmup_steps: int = 10_000
    final_share: float = 0.0
    power: float = 1.0
    """Of `poly`."""
    decay_steps: int | None = None
    """Of `wsd`: the last steps, in which the rate falls linearly."""


@dataclass(frozen=True)
class ParallelConfig:
    """Several processes; without effect in one (docs/pretraining.md, Scale)."""

    mode: Literal["ddp", "zero1", "fsdp"] = "ddp"
    """Everything whole in each process; optimizer state in parts; weights and gradients, too."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """In which gradients are sent."""


@dataclass(frozen=True)
class EvaluationConfig:
    """Figures on `data.heldout`: loss, accuracy and perplexity of masked tokens, also where pairs
    are trained; of replaced tokens both losses, accuracy and the share that was found."""

    every: int = 10_000
    """Steps; also after the last one."""
    batches: int = 50
    """At most; of each process."""
    average: bool = False
    """Of the averaged weights instead; see `average_decay`."""


@dataclass(frozen=True)
class CheckpointConfig:
    """What is kept in RUN/checkpoints."""

    every: int = 5_000
    keep: int = 3
    background: bool = True
    """Written from a copy in host memory while training goes on."""
    resume_from: str | None = None
    """Such as step-2000, instead of the last one; later ones are set aside."""


@dataclass(frozen=True)
class LogConfig:
    """What is shown; RUN/metrics.jsonl is always written."""

    progress: bool = True
    tensorboard: bool = False
    wandb_project: str | None = None
    peak_tflops: float | None = None
    """Of the device in this precision; given, the share of it that is used is shown."""


@dataclass(frozen=True)
class PretrainConfig:
    """A pretraining run."""

    output: str = ""
    """Folder of the run; a run that is there is resumed."""
    objective: Literal["masked_lm", "replaced_tokens"] = "masked_lm"
    """A BERT that predicts masked tokens, or an ELECTRA or DeBERTa that detects those a generator
    replaced."""
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "bf16"
    activation_checkpointing: bool = False
    """Layers keep their input alone and are computed again in the backward pass."""
    average_decay: float | None = None
    """Of an exponential average of the weights over the steps, kept beside them: 0.999, say."""
    last_layer_subset: bool = False
    """The last layer is computed for predicted tokens and the first of each sequence alone; without
    dropout the losses and gradients are the same."""
    max_skipped: int = 25
    """Steps in a row with gradients that are not finite after which the run stops."""
    model: ModelConfig = field(default_factory=ModelConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    data: DataConfig = field(default_factory=DataConfig)
    phases: tuple[Phase, ...] = (Phase(),)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)

    @property
    def num_steps(self) -> int:
        """Of all phases."""
        return sum(phase.steps for phase in self.phases)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as they stand in YAML."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class StudentConfig:
    """The student: what its teacher does not decide."""

    num_hidden_layers: int | None = None
    """Unset: half of the teacher's."""
    layers: tuple[int, ...] | None = None
    """The teacher's layers it begins with, from 0; unset: evenly from the first to the last."""
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    family: Literal["bert", "distilbert"] = "bert"
    """As which `fastbert export` writes it."""


@dataclass(frozen=True)
class DistillationConfig:
    """The teacher, and the losses against it: DistilBERT's, with the weights of its published
    training."""

    teacher: str = ""
    """Folder of a transformers BertForMaskedLM."""
    temperature: float = 2.0
    """Of both softmaxes of the soft loss."""
    soft_weight: float = 5.0
    """Of the divergence from the teacher at predicted tokens."""
    mlm_weight: float = 2.0
    """Of the masked-LM loss."""
    cosine_weight: float = 1.0
    """Of the angle between the last hidden states."""


@dataclass(frozen=True)
class DistillConfig(PretrainConfig):
    """A distillation run: a pretraining run whose model has a teacher."""

    model: StudentConfig = field(default_factory=StudentConfig)
    distillation: DistillationConfig = field(default_factory=DistillationConfig)


# Settings that may change between a run and its resumption: they touch what is learned by rounding
# at most.
FREE = ("output", "checkpoint", "log", "device", "parallel")


def ready_configs() -> list[str]:
    """Names of the configs that come along."""
    return sorted(path.stem for path in READY.glob("*.yaml"))


def read_config(name: str | Path, kind: type[PretrainConfig] = PretrainConfig) -> PretrainConfig:
    """A YAML file, or a config that comes along by its name.

    Args:
        name: of the file or config.
        kind: of run.

    Raises:
        ConfigError: no such file, no YAML, unknown keys, values of a wrong type.
    """
    path = READY / f"{name}.yaml" if str(name) in ready_configs() else Path(name)
    return config_from(_read_yaml(path), str(path), kind)


def read_run(folder: str | Path) -> PretrainConfig:
    """The settings of a run, of the kind it is.

    Raises:
        ConfigError: as `read_config`.
    """
    path = Path(folder) / "config.yaml"
    data = _read_yaml(path)
    kind = DistillConfig if "distillation" in data else PretrainConfig
    return config_from(data, str(path), kind)


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml

    try:
        return yaml.safe_load(path.read_text("utf-8")) or {}
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}; give a YAML file or one of "
            f"{', '.join(ready_configs())}"
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is no YAML: {error}") from error


def config_from(
    data: dict[str, Any], source: str = "config", kind: type[PretrainConfig] = PretrainConfig
) -> PretrainConfig:
    """Settings from nested mappings.

    Args:
        data: keys and values.
        source: named in messages.
        kind: of run.

    Raises:
        ConfigError: unknown keys, values of a wrong type, all of them at once.
    """
    import pydantic

    if not isinstance(data, dict):
        raise ConfigError(f"{source} must hold keys and values, got {type(data).__name__}")
    faults = _unknown_keys(data, kind, "")
    try:
        config = pydantic.TypeAdapter(kind).validate_python(data)
    except pydantic.ValidationError as error:
        faults += [
            f"{'.'.join(str(part) for part in e['loc'])}: {e['msg']}, got {e['input']!r}"
            for e in error.errors()
        ]
    if faults:
        raise ConfigError("\n".join(f"{source}: {fault}" for fault in faults))
    return config


def _unknown_keys(data: dict, kind: type, where: str) -> list[str]:
    """A line for each key that `kind` lacks, with the key that was meant."""
    known = {f.name: f for f in dataclasses.fields(kind)}
    lines = []
    for key, value in data.items():
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            meant = f"; did you mean {close[0]}?" if close else f"; known: {', '.join(known)}"
            lines.append(f"unknown key {where}{key}{meant}")
            continue
        inner = Phase if key == "phases" else known[key].type
        if dataclasses.is_dataclass(inner):
            parts = value if isinstance(value, list) else [value]
            for part in parts:
                if isinstance(part, dict):
                    lines += _unknown_keys(part, inner, f"{where}{key}.")
    return lines


def check(config: PretrainConfig, *, num_ranks: int = 1, has_gpu: bool = False) -> None:
    """Refuses settings that cannot work together.

    Args:
        config: of the run.
        num_ranks: processes.
        has_gpu: whether the run will use one.

    Raises:
        ConfigError: every fault that was found, each with the remedy.
    """
    faults = [
        *_faults_of_numbers(config),
        *_faults_of_phases(config, num_ranks),
        *_faults_of_data(config),
        *_faults_of_schedule(config),
    ]
    if isinstance(config, DistillConfig):
        faults += _faults_of_distillation(config)
    else:
        faults += _faults_of_model(config) + _faults_of_objective(config)
    if config.precision == "tf32" and not has_gpu:
        faults.append("precision tf32 is of GPUs; use fp32 or bf16 on a CPU")
    if faults:
        raise ConfigError("\n".join(faults))


def _faults_of_numbers(config: PretrainConfig) -> list[str]:
    faults = []
    for name in ("output", "data.corpus"):
        if not _value(config, name):
            faults.append(f"{name} is not set; give --{name} FOLDER or set it in the file")
    counts = ("evaluation.every", "evaluation.batches", "checkpoint.every", "checkpoint.keep")
    faults += _below_one(config, "max_skipped", *counts)
    for name in ("model.hidden_dropout_prob", "model.attention_probs_dropout_prob"):
        if not 0 <= _value(config, name) < 1:
            faults.append(f"{name} must lie in [0, 1), got {_value(config, name)}")
    if not 0 <= config.seed < 1 << 63:
        faults.append(f"seed must lie in 0 to 2^63 - 1, got {config.seed}")
    if config.average_decay is not None and not 0 < config.average_decay < 1:
        faults.append(f"average_decay must lie between 0 and 1, got {config.average_decay}")
    if config.evaluation.average and config.average_decay is None:
        faults.append("evaluation.average needs averages; set average_decay, to 0.999 say")
    clip = config.optimizer.max_grad_norm
    if clip is not None and clip <= 0:
        faults.append(f"optimizer.max_grad_norm must be above 0, or none, got {clip}")
    return faults


def _faults_of_model(config: PretrainConfig) -> list[str]:
    model = config.model
    faults = _below_one(
        config,
        "model.hidden_size",
        "model.num_hidden_layers",
        "model.num_attention_heads",
        "model.intermediate_size",
        "model.vocab_multiple_of",
    )
    if model.init_from is not None:
        return faults + _faults_of_checkpoint("model.init_from", model.init_from)
    if model.hidden_size % max(model.num_attention_heads, 1):
        faults.append(
            f"model.hidden_size {model.hidden_size} must be a multiple of "
            f"model.num_attention_heads {model.num_attention_heads}"
        )
    positions = model.max_position_embeddings
    for number, phase in enumerate(config.phases):
        if phase.max_length > positions:
            faults.append(
                f"phases.{number}.max_length {phase.max_length} exceeds "
                f"model.max_position_embeddings {positions}; raise that or shorten the sequences"
            )
    return faults


def _faults_of_objective(config: PretrainConfig) -> list[str]:
    model, generator, faults = config.model, config.generator, []
    if config.objective == "masked_lm":
        faults += [
            f"model.{name} belongs to objective replaced_tokens; drop it"
            for name in ("embedding_size", "family", "position_buckets")
            if getattr(model, name) is not None
        ]
        if generator != GeneratorConfig():
            faults.append("generator belongs to objective replaced_tokens; set that, or drop it")
        return faults
    if config.data.sequences != "packed":
        faults.append(
            f"data.sequences {config.data.sequences} has a second loss, which replaced_tokens "
            "leaves out; use packed"
        )
    if config.last_layer_subset:
        faults.append("last_layer_subset leaves out tokens that replaced_tokens judges; drop it")
    faults += _below_one(config, "model.embedding_size", "generator.num_hidden_layers")
    if not 0 <= generator.detection_weight < math.inf:
        faults.append(
            f"generator.detection_weight must be 0 or more, got {generator.detection_weight}"
        )
    faults += _faults_of_family(config)
    if generator.init_from is not None:
        return faults + _faults_of_begun_generator(generator)
    if not 0 < generator.size <= 1:
        return [*faults, f"generator.size must lie in (0, 1], got {generator.size}"]
    if model.init_from is not None:
        return faults
    sizes = generator_sizes(config)
    if not faults and sizes["hidden_size"] % sizes["num_attention_heads"]:
        faults.append(
            f"generator.size {generator.size} gives hidden_size {sizes['hidden_size']} and "
            f"{sizes['num_attention_heads']} heads, of which it must be a multiple; take another"
        )
    return faults


def _faults_of_family(config: PretrainConfig) -> list[str]:
    model, faults = config.model, []
    if config.generator.enhanced_mask_decoder and model.family == "electra":
        faults.append("generator.enhanced_mask_decoder is DeBERTa's; drop it or model.family")
    buckets = model.position_buckets
    if buckets is None:
        return faults
    if model.init_from is not None:
        return [*faults, "model.position_buckets is decided by model.init_from; drop one of them"]
    if model.family != "deberta-v2":
        faults.append("model.position_buckets belongs to model.family deberta-v2; set that, too")
    # The last distance's logarithm is then above 0.
    most = 2 * (model.max_position_embeddings - 2)
    if not 2 <= buckets <= most:
        faults.append(
            f"model.position_buckets must lie in 2 to {most} beside model.max_position_embeddings "
            f"{model.max_position_embeddings}, got {buckets}"
        )
    return faults


def _faults_of_begun_generator(generator: GeneratorConfig) -> list[str]:
    """Of one that begins with a checkpoint."""
    faults = _faults_of_checkpoint("generator.init_from", generator.init_from)
    default = GeneratorConfig()
    for name in ("size", "num_hidden_layers"):
        if getattr(generator, name) != getattr(default, name):
            faults.append(f"generator.{name} is decided by generator.init_from; drop one of them")
    return faults


def generator_sizes(config: PretrainConfig, model=None) -> dict[str, int]:
    """The generator's sizes by transformers' names, its shares rounded, at least 1.

    Args:
        config: of the run.
        model: has the discriminator's sizes as attributes; None: those of the config.
    """
    model, generator = config.model if model is None else model, config.generator
    shared = ("hidden_size", "num_attention_heads", "intermediate_size")
    sizes = {name: max(1, round(getattr(model, name) * generator.size)) for name in shared}
    return sizes | {"num_hidden_layers": generator.num_hidden_layers or model.num_hidden_layers}


def _faults_of_checkpoint(name: str, checkpoint: str) -> list[str]:
    try:
        check_checkpoint(name, checkpoint, tokenizer=False)
    except FileNotFoundError as error:
        return [str(error)]
    return []


def _faults_of_distillation(config: DistillConfig) -> list[str]:
    faults, student, settings = [], config.model, config.distillation
    if not settings.teacher:
        faults.append(
            "distillation.teacher is not set; give --distillation.teacher FOLDER or set it in the "
            "file"
        )
    else:
        faults += _faults_of_checkpoint("distillation.teacher", settings.teacher)
    if not 0 < settings.temperature < math.inf:
        faults.append(f"distillation.temperature must be above 0, got {settings.temperature}")
    for name in ("soft_weight", "mlm_weight", "cosine_weight"):
        if not 0 <= getattr(settings, name) < math.inf:
            faults.append(f"distillation.{name} must be 0 or more, got {getattr(settings, name)}")
    if settings.soft_weight == settings.cosine_weight == 0:
        faults.append(
            "distillation.soft_weight and cosine_weight are both 0, so nothing is learned from the "
            "teacher; use fastbert pretrain"
        )
    faults += _below_one(config, "model.num_hidden_layers")
    if student.layers is not None:
        if not student.layers:
            faults.append("model.layers is empty; name at least one of the teacher's layers")
        if student.num_hidden_layers not in (None, len(student.layers)):
            faults.append(
                f"model.num_hidden_layers is {student.num_hidden_layers}, but model.layers names "
                f"{len(student.layers)}; drop one of the two"
            )
    if config.objective != "masked_lm" or config.generator != GeneratorConfig():
        faults.append("objective and generator are of fastbert pretrain; drop them")
    if config.data.sequences != "packed":
        faults.append(
            f"data.sequences {config.data.sequences} has a second loss, which distillation leaves "
            "out; use packed"
        )
    if config.last_layer_subset:
        faults.append(
            "last_layer_subset leaves out hidden states that the cosine loss compares; drop it"
        )
    return faults


def _faults_of_phases(config: PretrainConfig, num_ranks: int) -> list[str]:
    faults = [] if config.phases else ["phases is empty; give at least one"]
    for number, phase in enumerate(config.phases):
        where = f"phases.{number}"
        if phase.steps < 1:
            faults.append(f"{where}.steps must be at least 1, got {phase.steps}")
        if not 5 <= phase.max_length <= phase.tokens_per_batch:
            faults.append(
                f"{where}.max_length must lie in 5 to tokens_per_batch {phase.tokens_per_batch}, "
                f"got {phase.max_length}"
            )
            continue
        together = phase.tokens_per_batch * num_ranks
        if phase.tokens_per_step < together or phase.tokens_per_step % together:
            fitting = max(round(phase.tokens_per_step / together), 1) * together
            faults.append(
                f"{where}.tokens_per_step {phase.tokens_per_step} must be a multiple of "
                f"tokens_per_batch {phase.tokens_per_batch} x {num_ranks} processes; nearest: "
                f"{fitting}"
            )
    return faults


def _faults_of_data(config: PretrainConfig) -> list[str]:
    data = config.data
    faults = _below_one(config, "data.labels_per_batch", "data.sequences_per_batch")
    if not 0 <= data.short_share <= 1:
        faults.append(f"data.short_share must be between 0 and 1, got {data.short_share}")
    masking = data.masking
    if masking.final_rate is not None and masking.fixed_count is not None:
        faults.append("data.masking: fixed_count leaves no rate; drop it or final_rate")
    if masking.rate <= 0:
        faults.append(f"data.masking.rate must be above 0, got {masking.rate}")
    return faults


def _faults_of_schedule(config: PretrainConfig) -> list[str]:
    schedule, steps = config.schedule, config.num_steps
    faults = []
    fits = 0 <= schedule.warmup_steps <= steps
    if not fits:
        faults.append(
            f"schedule.warmup_steps must lie in 0 to the {steps} steps of all phases, got "
            f"{schedule.warmup_steps}; give --schedule.warmup-steps {max(steps, 0) // 10}, say, or "
            "more steps"
        )
    if not 0 <= schedule.final_share <= 1:
        faults.append(f"schedule.final_share must be between 0 and 1, got {schedule.final_share}")
    if schedule.power <= 0:
        faults.append(f"schedule.power must be above 0, got {schedule.power}")
    if (schedule.kind == "wsd") != (schedule.decay_steps is not None):
        faults.append("schedule.decay_steps belongs to kind wsd: set both or neither")
    elif (
        fits
        and schedule.decay_steps is not None
        and not (1 <= schedule.decay_steps <= steps - schedule.warmup_steps)
    ):
        faults.append(
            f"schedule.decay_steps must lie in 1 to the {steps - schedule.warmup_steps} steps "
            f"behind the warm-up, got {schedule.decay_steps}"
        )
    return faults


def _below_one(config: PretrainConfig, *names: str) -> list[str]:
    """A fault for each of these counts, by their dotted names, that is set and below 1."""
    return [
        f"{name} must be at least 1, got {_value(config, name)}"
        for name in names
        if _value(config, name) is not None and _value(config, name) < 1
    ]


def _value(config: PretrainConfig, dotted: str):
    value = config
    for name in dotted.split("."):
        value = getattr(value, name)
    return value

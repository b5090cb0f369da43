"""What is measured, by whom, and what fastbert is held to."""

from dataclasses import dataclass, field

from ..shapes import (
    BASE,
    DENSE_8X128,
    DENSE_8X512,
    MINILM,
    RAGGED_8X512,
    RAGGED_32X128,
)

ONE_16, ONE_128 = ([16], 16), ([128], 128)
MODELS = {"base": BASE, "minilm": MINILM}
SENTENCES = "sentences"
"""The batch of the cases in which texts go in and vectors come out."""


@dataclass(frozen=True)
class Participant:
    """One side of a comparison, in a process of its own.

    Attributes:
        library: what has to be installed; "fastbert" and "torch" always are.
        make: function of makers.py or embedding.py.
        options: its arguments beside the model.
        tolerance: largest relative L2 distance from float64 on real tokens (of vectors: largest
            1 - cosine from sentence-transformers in fp32); None: nothing to compare.
        threads: of the process; None: torch's own number.
        environment: variables of the process.
        compiles: whether each new shape costs minutes.
    """

    library: str
    make: str
    options: dict = field(default_factory=dict)
    tolerance: float | None = None
    threads: int | None = None
    environment: dict = field(default_factory=dict)
    compiles: bool = False

    @property
    def file(self) -> str | None:
        """What it loads beside the checkpoint."""
        return self.options.get("file")


FP32, BF16, INT8 = 1e-5, 5e-2, 0.3


def _transformers(attention: str, dtype: str, tolerance: float) -> Participant:
    options = {"attention": attention, "dtype": dtype}
    return Participant("transformers", "transformers_model", options, tolerance)


def _compiled(freezing: bool, dtype: str, tolerance: float) -> Participant:
    options = {"freezing": freezing, "dtype": dtype}
    return Participant("torch.compile", "compiled", options, tolerance, compiles=True)


def _openvino(precision: str, file: str, tolerance: float) -> Participant:
    options = {"precision": precision, "file": file}
    return Participant("openvino", "openvino_model", options, tolerance)


def _onnxruntime(file: str, tolerance: float) -> Participant:
    return Participant("onnxruntime", "onnxruntime_model", {"file": file}, tolerance)


def _fastbert(
    dtype: str,
    tolerance: float,
    precision: str = "highest",
    quantized: str | None = None,
    **more,
) -> Participant:
    options = {"dtype": dtype, "precision": precision, "quantized": quantized}
    return Participant("fastbert", "fastbert_model", options, tolerance, **more)


PLAIN = {"FASTBERT_SPLIT_FP32": "0"}
PARTICIPANTS = {
    "transformers eager bf16": _transformers("eager", "bfloat16", BF16),
    "transformers sdpa bf16": _transformers("sdpa", "bfloat16", BF16),
    "torch.compile bf16": _compiled(False, "bfloat16", BF16),
    "torch.compile freezing bf16": _compiled(True, "bfloat16", BF16),
    "openvino bf16": _openvino("bf16", "fp32.xml", BF16),
    "fastbert bf16": _fastbert("bfloat16", BF16),
    "fastbert bf16, 1 thread": _fastbert("bfloat16", BF16, threads=1),
    "floor bf16": Participant("torch", "floor", {"dtype": "bfloat16"}),
    "streaming of the weights bf16": Participant("torch", "streaming", {"dtype": "bfloat16"}),
    "transformers eager fp32": _transformers("eager", "float32", FP32),
    "transformers sdpa fp32": _transformers("sdpa", "float32", FP32),
    "torch.compile fp32": _compiled(False, "float32", FP32),
    "torch.compile freezing fp32": _compiled(True, "float32", FP32),
    "onnxruntime fp32": _onnxruntime("fp32.onnx", FP32),
    "onnxruntime fused attention fp32": _onnxruntime("fused.onnx", FP32),
    "openvino fp32": _openvino("f32", "fp32.xml", FP32),
    "fastbert fp32, plain": _fastbert("float32", FP32, environment=PLAIN),
    "fastbert fp32, six products": _fastbert("float32", FP32),
    "fastbert fp32, high": _fastbert("float32", 2e-5, "high"),
    "floor fp32": Participant("torch", "floor", {"dtype": "float32"}),
    "onnxruntime int8": _onnxruntime("int8.onnx", INT8),
    "onnxruntime fused attention int8": _onnxruntime("int8-fused.onnx", INT8),
    "openvino int8": _openvino("bf16", "int8.xml", INT8),
    "fastbert int8, dynamic": _fastbert("bfloat16", INT8, quantized="dynamic"),
    "fastbert int8, weight_only": _fastbert("bfloat16", INT8, quantized="weight_only"),
}
EMBEDDERS = {
    f"{library} {name}": Participant(
        library,
        "their_embedder" if library == "sentence-transformers" else "our_embedder",
        {"dtype": dtype, "precision": precision},
        tolerance,
    )
    for library in ("sentence-transformers", "fastbert")
    for name, dtype, precision, tolerance in (
        ("fp32", "float32", "highest", 1e-5),
        ("fp32, high", "float32", "high", 1e-5),
        ("bf16", "bfloat16", "highest", 1e-3),
    )
    if (library, name) != ("sentence-transformers", "fp32, high")
}
ALL = {**PARTICIPANTS, **{f"{name} (texts)": value for name, value in EMBEDDERS.items()}}


@dataclass(frozen=True)
class Target:
    """At least so many times faster than the fastest of `over`, or at most so many times its time.

    Attributes:
        ours, over: participants. parts: factor of the time of `over`, 3 for three products.
    """

    ours: str
    over: tuple[str, ...]
    at_least: float | None = None
    at_most: float | None = None
    parts: int = 1


@dataclass(frozen=True)
class Case:
    """A batch of a model, timed by several participants."""

    name: str
    model: str
    batch: tuple[list[int], int] | str
    participants: tuple[str, ...]
    targets: tuple[Target, ...] = ()


BF16_PEERS = (
    "transformers eager bf16",
    "transformers sdpa bf16",
    "torch.compile freezing bf16",
    "openvino bf16",
)
FP32_PEERS = (
    "transformers eager fp32",
    "transformers sdpa fp32",
    "torch.compile freezing fp32",
    "onnxruntime fp32",
    "onnxruntime fused attention fp32",
    "openvino fp32",
)
ONNX_INT8 = ("onnxruntime int8", "onnxruntime fused attention int8")
INT8_PEERS = (*ONNX_INT8, "openvino int8")
FASTBERT_INT8 = ("fastbert int8, dynamic", "fastbert int8, weight_only")
FASTBERT_FP32 = ("fastbert fp32, plain", "fastbert fp32, six products", "fastbert fp32, high")


def _bf16(name: str, batch, *targets: Target, more: tuple[str, ...] = ()) -> Case:
    sides = (*BF16_PEERS, "floor bf16", *more, "fastbert bf16")
    return Case(f"bf16 {name}", "base", batch, sides, targets)


def _fp32(name: str, batch, plain: float, high: bool = True, more: tuple[str, ...] = ()) -> Case:
    peers = (*FP32_PEERS, *more)
    targets = [Target("fastbert fp32, plain", peers, at_least=plain)]
    if high:
        floor = ("floor bf16",)
        targets.append(Target("fastbert fp32, high", floor, at_most=1.15, parts=3))
    sides = (*peers, "floor fp32", "floor bf16", *FASTBERT_FP32)
    return Case(f"fp32 {name}", "base", batch, sides, tuple(targets))


def _int8(name: str, batch, at_least: float | None) -> Case:
    targets = [] if at_least is None else [Target(FASTBERT_INT8[0], ONNX_INT8, at_least)]
    return Case(f"int8 {name}", "base", batch, (*INT8_PEERS, *FASTBERT_INT8), tuple(targets))


def _best(at_least: float) -> Target:
    return Target("fastbert bf16", BF16_PEERS, at_least=at_least)


def _over(peer: str, at_least: float) -> Target:
    return Target("fastbert bf16", (peer,), at_least=at_least)


def _floor(at_most: float) -> Target:
    return Target("fastbert bf16", ("floor bf16",), at_most=at_most)


STREAMING = "streaming of the weights bf16"
_MINILM = ("transformers sdpa bf16", "openvino bf16", "floor bf16", "fastbert bf16")
_TEXTS = tuple(f"{name} (texts)" for name in EMBEDDERS)


def _texts(ours: str, theirs: str, at_least: float) -> Target:
    over = (f"sentence-transformers {theirs} (texts)",)
    return Target(f"fastbert {ours} (texts)", over, at_least)


# The ragged batch comes first where memory is held to a bound: later batches leave their own.
CASES = (
    _bf16("ragged 32x128", RAGGED_32X128, _best(3.3)),
    # torch.compile by default once for each dtype: it takes as long to start as frozen, and runs
    # slower.
    _bf16("dense 8x128", DENSE_8X128, _floor(1.15), _best(1.15), more=("torch.compile bf16",)),
    _bf16("dense 1x128", ONE_128, _floor(1.15), _best(1.2)),
    _bf16("dense 8x512", DENSE_8X512, _floor(1.25), _best(1.25)),
    _bf16(
        "dense 1x16",
        ONE_16,
        _over("openvino bf16", 1.35),
        Target("fastbert bf16", (STREAMING,), at_most=1.25),
        more=(STREAMING,),
    ),
    _bf16("ragged 8x512", RAGGED_8X512, _best(2.4)),
    Case(
        "bf16 dense 8x128, threads",
        "base",
        DENSE_8X128,
        ("fastbert bf16, 1 thread", "fastbert bf16"),
        (Target("fastbert bf16", ("fastbert bf16, 1 thread",), at_least=1.7),),
    ),
    _fp32("ragged 32x128", RAGGED_32X128, 3.8, high=False),
    _fp32("dense 8x128", DENSE_8X128, 1.0, more=("torch.compile fp32",)),
    _fp32("dense 1x128", ONE_128, 1.0),
    _fp32("dense 1x16", ONE_16, 1.2),
    Case(
        "minilm bf16 1x16",
        "minilm",
        ONE_16,
        ("transformers sdpa fp32", *_MINILM),
        (_over("openvino bf16", 1.6), _over("transformers sdpa fp32", 6.0)),
    ),
    Case("minilm bf16 1x128", "minilm", ONE_128, _MINILM, (_over("openvino bf16", 1.5),)),
    Case(
        "minilm bf16 ragged 32x128",
        "minilm",
        RAGGED_32X128,
        _MINILM,
        (_over("openvino bf16", 3.3),),
    ),
    _int8("ragged 32x128", RAGGED_32X128, None),
    _int8("8x128", DENSE_8X128, 1.5),
    _int8("1x16", ONE_16, 1.3),
    Case(
        "minilm, 2,000 sentences",
        "minilm",
        SENTENCES,
        _TEXTS,
        (
            _texts("fp32", "fp32", 1.15),
            _texts("fp32, high", "fp32", 1.5),
            _texts("bf16", "bf16", 2.0),
            _texts("bf16", "fp32", 3.5),
        ),
    ),
)


def matrices(settings: dict) -> list[tuple[int, int]]:
    """(columns, rows) of the products of a layer, query, key and value as one."""
    hidden, inner = settings["hidden_size"], settings["intermediate_size"]
    return [(hidden, 3 * hidden), (hidden, hidden), (hidden, inner), (inner, hidden)]


def weight_elements(settings: dict) -> int:
    """Elements of the matrices that every forward reads."""
    return settings["num_hidden_layers"] * sum(k * n for k, n in matrices(settings))

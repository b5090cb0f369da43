"""Bytes, FLOPs and the least time of every op at BERT-base and BERT-large shapes.

    python benchmarks/gpu/roofline.py > docs/roofline.md

The two rates are what an H200 does at most: 4.3 TB/s copied and 790 TFLOP/s of bf16 matmul. Real
ones are measured by run_all.py, which holds kernels to those.
"""

import dataclasses

BYTES_A_SECOND = 4.3e12
FLOPS_A_SECOND = 790e12
TOKENS = 16_384
SEQLEN = 512
MASKED = 0.15
VOCAB = 30_522
BF16, FP32 = 2, 4


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of one op, forward or backward: what must be moved and computed at least."""

    op: str
    bytes: float
    flops: float = 0.0

    @property
    def microseconds(self) -> float:
        return 1e6 * max(self.bytes / BYTES_A_SECOND, self.flops / FLOPS_A_SECOND)

    @property
    def bound(self) -> str:
        memory = self.bytes / BYTES_A_SECOND >= self.flops / FLOPS_A_SECOND
        return "memory" if memory else "matmul"


def costs(hidden: int, intermediate: int) -> list[Cost]:
    """Every op of a layer and of the model's ends, bf16, `TOKENS` packed tokens."""
    row = TOKENS * hidden * BF16
    inner = TOKENS * intermediate * BF16
    # 4·s·C FLOPs a token forward; backward makes the scores again and four more products.
    attention = 4 * TOKENS * SEQLEN * hidden
    # Beside it as many products with the two position tables, which have a row for each distance
    # up to half of SEQLEN; backward makes theirs again too, and two more to each table.
    tables = 2 * SEQLEN * hidden * BF16
    labelled = round(MASKED * TOKENS)
    decoder = VOCAB * hidden * BF16
    loss = 2 * labelled * hidden * VOCAB
    gemm = 2 * TOKENS * hidden * intermediate
    weight = hidden * intermediate * BF16
    return [
        Cost("embed_layer_norm forward", 5 * row),
        Cost("embed_layer_norm backward", 2 * row + 2 * TOKENS * hidden * FP32 + decoder),
        Cost("attention forward", 4 * row, attention),
        Cost("attention backward", 8 * row, 2.5 * attention),
        Cost("add_layer_norm forward", 4 * row),
        Cost("add_layer_norm backward", 4 * row),
        Cost("bias_gelu forward", 2 * inner),
        Cost("bias_gelu backward", 3 * inner),
        Cost("linear_gelu forward", row + weight + 2 * inner, gemm),
        Cost("linear_gelu backward", 2 * row + 2 * weight + 2 * inner, 2 * gemm),
        Cost("disentangled_attention forward", 4 * row + tables, 2 * attention),
        Cost("disentangled_attention backward", 8 * row + 2 * tables, 5.5 * attention),
        Cost("mlm_cross_entropy forward", labelled * hidden * BF16 + decoder, loss),
        Cost("mlm_cross_entropy backward", 2 * labelled * hidden * BF16 + 2 * decoder, 3 * loss),
        Cost("mlm_distillation forward", 2 * (labelled * hidden * BF16 + decoder), 2 * loss),
        Cost("mlm_distillation backward", 3 * (labelled * hidden * BF16 + decoder), 4 * loss),
        Cost("unpad", 2 * row),
    ]


def page() -> str:
    """The table as Markdown."""
    lines = [
        "# Roofline",
        "",
        f"What each op moves and computes at least, bf16, {TOKENS:,} packed tokens in sequences of",
        f"{SEQLEN}, {MASKED:.0%} of them labelled; the time is the longer of the two at",
        f"{BYTES_A_SECOND / 1e12} TB/s and {FLOPS_A_SECOND / 1e12:.0f} TFLOP/s, what an H200 does "
        "at most. Nothing on this page is",
        "measured. Made by `python benchmarks/gpu/roofline.py`.",
    ]
    for name, sizes in (("BERT-base", (768, 3072)), ("BERT-large", (1024, 4096))):
        lines += ["", f"## {name}", "", "| op | MB | GFLOP | µs at least | bound by |"]
        lines.append("|---|---:|---:|---:|---|")
        for cost in costs(*sizes):
            lines.append(
                f"| {cost.op} | {cost.bytes / 1e6:.0f} | {cost.flops / 1e9:.0f} "
                f"| {cost.microseconds:.0f} | {cost.bound} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    print(page())

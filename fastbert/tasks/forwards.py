"""Forwards of a model over features, batch by batch."""

from collections.abc import Iterator, Sequence


def forwards(
    model,
    features: Sequence[dict],
    collator,
    *,
    batch_size: int,
    bf16: bool,
    progress: bool,
) -> Iterator[tuple[range, dict, object]]:
    """The numbers of a batch's features, the batch, and what the model makes of it.

    Args:
        model: is moved to a GPU where there is one.
        features: not padded. collator: makes a batch of some.
        batch_size: features of a batch. bf16: autocast to it. progress: show a bar on stderr.
    """
    import torch
    from tqdm import tqdm

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device).eval()
    with tqdm(total=len(features), unit="feature", disable=not progress) as bar:
        for first in range(0, len(features), batch_size):
            numbers = range(first, min(first + batch_size, len(features)))
            batch = {k: v.to(device) for k, v in collator([features[i] for i in numbers]).items()}
            with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                outputs = model(**batch)
            yield numbers, batch, outputs
            bar.update(len(numbers))

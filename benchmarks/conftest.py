"""One seed, the sizes in the header, and `--tiny` to cut them for the suite's own test."""

from pathlib import Path

import pytest
import torch

from .shapes import BATCHES, SEED, describe


def pytest_addoption(parser):
    parser.addoption("--tiny", action="store_true", help="smallest sizes, to see that all run")
    parser.addoption(
        "--texts", nargs="*", type=Path, default=[], help="files or folders of text, for training"
    )


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(SEED)


@pytest.fixture
def tiny(request) -> bool:
    return request.config.getoption("--tiny")


def pytest_report_header():
    machine = f"torch {torch.__version__}, {torch.get_num_threads()} threads"
    return [machine, *(f"{name}: {describe(batch)}" for name, batch in BATCHES.items())]

"""One seed, and the size the whole suite may be cut to (`--tiny`, for the suite's own test)."""

import pytest
import torch

from .shapes import SEED


def pytest_addoption(parser):
    parser.addoption("--tiny", action="store_true", help="smallest sizes, to see that all run")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(SEED)


@pytest.fixture
def tiny(request) -> bool:
    return request.config.getoption("--tiny")


def pytest_report_header():
    return f"torch {torch.__version__}, {torch.get_num_threads()} threads"

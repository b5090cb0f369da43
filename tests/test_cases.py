"""The cases drawn from public trouble reports on our models, where a developer has them."""

import importlib.util
import os

import pytest

import fastbert

CASES = [
    *("P02", "P03", "P05", "P07", "P08", "P10", "P12", "P14", "P15", "P16", "P17", "P21", "P23"),
    *("P26", "P28", "P29", "P30", "P34", "P36", "P37", "P40", "P43", "P44", "P46", "P48", "P49"),
    *("P51", "P52", "P53", "P55", "P57", "P59", "P61", "P62", "P66", "P69", "P71", "P77", "P78"),
]


@pytest.mark.parametrize("case", CASES)
def test_case(case, shared_data, monkeypatch):
    folder = shared_data / "cases"
    paths = sorted(folder.glob(f"{case}_*.py"))
    if not paths:
        pytest.skip(f"no case {case}")
    spec = importlib.util.spec_from_file_location(case, paths[0])
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(os.environ, "PAIN_DEVICE", "cpu")
    spec.loader.exec_module(module)
    module.run(fastbert)

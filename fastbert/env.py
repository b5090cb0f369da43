"""What is installed here, and which implementation serves which op and why: `fastbert env`."""

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys

import torch

import fastbert
from fastbert import dispatch, extension
from fastbert.peers import apex, flash_attn

PARTS = ("compiled part", "CUDA part")
PROVEN = {
    "hardware": "run on its hardware",
    "interpreter": "checked in Triton's interpreter only",
    "emulation": "checked in emulation only",
    "nowhere": "never run",
}


def report() -> dict:
    """Everything `fastbert env` prints, as plain data."""
    _register_ops()
    return {
        "versions": _versions(),
        "devices": _devices(),
        "cpu": _cpu(),
        "compiled part": extension.load() or "loaded",
        "CUDA part": extension.load("_C_cuda") or "loaded",
        "FASTBERT_BACKEND": os.environ.get("FASTBERT_BACKEND", ""),
        "peers": _peers(),
        "ops": dispatch.describe(),
    }


def render(data: dict, as_json: bool = False) -> str:
    """`report()` as text, or as JSON."""
    if as_json:
        return json.dumps(data, indent=1)
    lines = []
    for title in ("versions", "devices", "cpu"):
        lines.append(title)
        lines += [f"  {name:24}{value}" for name, value in data[title].items()]
    for part in PARTS:
        lines.append(f"{part:26}{data[part]}")
    if data["FASTBERT_BACKEND"]:
        lines.append(f"FASTBERT_BACKEND          {data['FASTBERT_BACKEND']}")
    lines.append("peers, used only where they are named")
    lines += [f"  {name:24}{value}" for name, value in data["peers"].items()]
    lines.append("ops")
    for row in data["ops"]:
        lines.append(f"  {row['op']:25} {row['device']}: {row['chosen']}")
        for backend, reasons in row["rejected"].items():
            shown = [_short(reason, data) for reason in reasons]
            lines.append(f"  {'':26}not {backend}: {'; '.join(shown)}")
        for backend, where in row["proven"].items():
            if where != "hardware":
                lines.append(f"  {'':26}{backend}: {PROVEN[where]}")
    return "\n".join(lines)


def _short(reason: str, data: dict) -> str:
    """A reason that was given in full above is not repeated for every op."""
    part = next((part for part in PARTS if reason == data[part]), None)
    return reason if part is None else f"the {part} is not loaded"


def _register_ops() -> None:
    """An op is known once its module was imported."""
    import fastbert.ops  # noqa: F401


def _versions() -> dict[str, str]:
    versions = {"fastbert": fastbert.__version__, "python": platform.python_version()}
    for name in ("torch", "transformers", "triton", "tokenizers", "safetensors"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    versions["cuda of torch"] = torch.version.cuda or "none"
    versions["nvcc"] = _nvcc()
    versions["platform"] = f"{platform.system()} {platform.machine()}"
    return versions


def _peers() -> dict[str, str]:
    reasons = {name: flash_attn.why_not_importable(name) for name in flash_attn.GENERATIONS}
    reasons["apex"] = apex.why_not_importable()
    return {name: reason or "importable" for name, reason in reasons.items()}


def _nvcc() -> str:
    path = shutil.which("nvcc")
    if path is None:
        return "not found"
    text = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
    releases = [line for line in text.splitlines() if "release" in line]
    return releases[0].split("release")[1].split(",")[0].strip() if releases else "unknown"


def _devices() -> dict[str, str]:
    devices = {"cpu": f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"}
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        devices[f"cuda:{index}"] = f"{torch.cuda.get_device_name(index)}, sm_{major}{minor}"
    return devices


def _cpu() -> dict[str, str]:
    features = {
        "C++ kernels": extension.cpu_isa() or "not loaded",
        "capability of torch": torch.backends.cpu.get_cpu_capability(),
    }
    for name in ("avx2", "avx512", "avx512_bf16", "amx_tile"):
        probe = getattr(torch.cpu, f"_is_{name}_supported", None)
        features[name] = "unknown" if probe is None else ("yes" if probe() else "no")
    return features


if __name__ == "__main__":
    print(render(report(), "--json" in sys.argv[1:]))

"""Which implementation serves an op, chosen inside the op and for a reason that can be shown.

Every op is defined once, here, with its schema. Its one kernel (key CompositeExplicitAutograd, so
CPU, CUDA and every other device) asks `choose()` and runs the C++ op, the Triton launcher or the
plain PyTorch reference. Choosing inside the op keeps compiled graphs free of guards.

A choice is bound to the context (`contextvars`): threads and async tasks do not see each other's
`use_backend`. autograd runs backward in threads of its own, so each autograd.Function records
`current_binding()` in forward and restores it with `bound()` in backward.
"""

import contextlib
import contextvars
import functools
import importlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

logger = logging.getLogger("fastbert")

LIBRARY = torch.library.Library("fastbert", "DEF")

BACKENDS = ("reference", "cpu", "triton", "cuda", "cuda_emulated")
PEERS = {
    "flash_attn": {"attention": "fastbert.peers.flash_attn:flash_attn"},
    "flash_attn_3": {"attention": "fastbert.peers.flash_attn:flash_attn_3"},
    "flash_attn_4": {"attention": "fastbert.peers.flash_attn:flash_attn_4"},
    "apex": {"add_layer_norm": "fastbert.peers.apex:layer_norm"},
}
"""Other projects' implementations, never chosen by themselves: `"module:function"` per op. They
bring their own autograd, so the op's public function calls them in the registered op's place."""
CANDIDATES = {"cpu": ("cpu", "reference"), "cuda": ("triton", "cuda", "reference")}
OLDEST_CAPABILITY = (8, 0)
SUBSTITUTE = "reference"
"""What an op runs under `use_backend(name)` when it has no file in the room `name`."""

NotSupported = Callable[..., list[str]]
CudaExtra = tuple[str, Callable[..., tuple]]

COMPILED = {"cpu": "_C", "cuda": "_C_cuda", "cuda_emulated": "_C_emulated"}
"""Backends that are C++ ops `fastbert::<name>_<backend>`, and the module that registers them."""


@dataclass(frozen=True)
class Op:
    """One registered op: its implementations and what they cannot do."""

    name: str
    room: str
    reference: Callable
    triton: str | None
    cpu: bool
    cuda: bool
    cuda_extra: CudaExtra | None = None
    not_supported: Mapping[str, NotSupported] = field(default_factory=dict)

    def has(self, backend: str) -> bool:
        """Whether this op has a file in the room of `backend`, or a peer of that name."""
        if backend in PEERS:
            return self.room in PEERS[backend]
        return {
            "reference": True,
            "cpu": self.cpu,
            "triton": self.triton is not None,
            "cuda": self.cuda,
            "cuda_emulated": self.cuda,
        }[backend]


OPS: dict[str, Op] = {}
_calls: Counter[tuple[str, str]] = Counter()
_logged: set[tuple[str, str, str]] = set()


def register_op(
    name: str,
    schema: str,
    *,
    room: str,
    fake: Callable,
    reference: Callable,
    triton: str | None = None,
    cpu: bool = False,
    cuda: bool = False,
    cuda_extra: CudaExtra | None = None,
    not_supported: Mapping[str, NotSupported] | None = None,
):
    """Defines `fastbert::<name>` and returns its `OpOverload`.

    Args:
        name: op name, `<room>_fwd`, `<room>_bwd` or the room's own.
        schema: argument and return types, without the name.
        room: the op's one name in every layer, the key of `use_backend(<room>=...)`.
        fake: shapes and dtypes of the outputs from those of the inputs.
        reference: plain PyTorch implementation with the arguments of the schema.
        triton: `"module:launcher"` of the Triton implementation, imported at its first use.
        cpu: whether csrc/cpu has an implementation, registered by C++ as `fastbert::<name>_cpu`.
        cuda: whether csrc/cuda has an implementation, registered by C++ as `fastbert::<name>_cuda`
            and, emulated for tests, as `fastbert::<name>_cuda_emulated`. What `not_supported` says
            of `cuda` holds for both.
        cuda_extra: further arguments of that implementation: their types and names, as in
            `schema`, and a function of the op's arguments that gives them.
        not_supported: per backend, a cheap pure function of the arguments that returns the reasons
            why that backend cannot take them (empty: it can).
    """
    LIBRARY.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    if cpu:
        LIBRARY.define(f"{name}_cpu{schema}")
    if cuda:
        types = schema if cuda_extra is None else schema.replace(")", f", {cuda_extra[0]})", 1)
        for backend in ("cuda", "cuda_emulated"):
            LIBRARY.define(f"{name}_{backend}{types}")
    op = Op(name, room, reference, triton, cpu, cuda, cuda_extra, dict(not_supported or {}))
    OPS[name] = op

    def run(*args):
        return _run(op, args)

    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fastbert::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.fastbert, name).default


# --- choosing -------------------------------------------------------------------------------------


def _parse_binding(text: str) -> dict[str, str]:
    """Reads FASTBERT_BACKEND: `triton` or `attention=reference,bias_gelu=triton`."""
    binding = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        room, _, backend = part.rpartition("=")
        _known_backend(backend, "FASTBERT_BACKEND")
        binding.update({room: backend} if room else _bind_all(backend, binding))
    return binding


def _bind_all(backend: str, binding: Mapping[str, str]) -> dict[str, str]:
    """Every op bound to `backend`; of a peer, the ops it has, and the others left as they are."""
    if backend in PEERS:
        return {**binding, **dict.fromkeys(PEERS[backend], backend)}
    return {"*": backend}


def _known_backend(backend: str, where: str) -> str:
    known = ("auto", *BACKENDS, *PEERS)
    if backend not in known:
        raise ValueError(f"{where}: unknown backend {backend!r}; known are {', '.join(known)}")
    return backend


_process_binding = _parse_binding(os.environ.get("FASTBERT_BACKEND", ""))
_binding: contextvars.ContextVar[Mapping[str, str] | None] = contextvars.ContextVar(
    "fastbert_backend", default=None
)


def _bound() -> Mapping[str, str]:
    """The binding of this context, or the process's."""
    binding = _binding.get()
    return _process_binding if binding is None else binding


@contextlib.contextmanager
def use_backend(backend: str | None = None, /, **by_op: str) -> Iterator[None]:
    """Binds ops to an implementation inside a `with` block, in this context (thread, task) only.

    `use_backend("triton")` binds every op that has a Triton file; the others run their substitute,
    the reference. `use_backend(attention="reference")` binds one op and leaves the rest. A bound
    implementation that cannot take the inputs raises NotImplementedError with its reasons: it is
    never replaced silently.

    A peer (`flash_attn`, `flash_attn_3`, `flash_attn_4`, `apex`) is another project's kernel and is
    used only where it is named: `use_backend("flash_attn")` binds the one op it has and leaves the
    rest. See docs/peers.md.

    Args:
        backend: `auto`, `reference`, `cpu`, `triton`, `cuda` or `cuda_emulated`, for all ops; or a
            peer.
        by_op: the same per op name.

    Raises:
        ValueError: unknown backend or op, or an op named with a room it has no file in.
    """
    binding = dict(_bound())
    if backend is not None:
        binding = _bind_all(_known_backend(backend, "use_backend"), binding)
    for room, name in by_op.items():
        members = [op for op in OPS.values() if op.room == room]
        if not members:
            raise ValueError(f"use_backend: unknown op {room!r}; known are {', '.join(rooms())}")
        _known_backend(name, "use_backend")
        if name != "auto" and not any(op.has(name) for op in members):
            raise ValueError(f"use_backend: {room} has no {name} implementation")
        binding[room] = name
    with bound(binding):
        yield


@contextlib.contextmanager
def bound(binding: Mapping[str, str] | None) -> Iterator[None]:
    """Restores a binding taken by `current_binding()`; None leaves the present one."""
    if binding is None:
        yield
        return
    token = _binding.set(binding)
    try:
        yield
    finally:
        _binding.reset(token)


def current_binding() -> Mapping[str, str] | None:
    """The binding in force, for backward to restore; None while a graph is being traced."""
    return None if torch.compiler.is_compiling() else _bound()


def peer(room: str) -> Callable | None:
    """The function of the peer this context names for `room`, or None.

    While a graph is traced there is none: a peer is no part of the registered op, whose call is
    then recorded and refused when it runs.
    """
    name = None if torch.compiler.is_compiling() else _bound().get(room)
    path = PEERS.get(name, {}).get(room)
    return None if path is None else _imported(path)


def bound_to(*rooms: str) -> set[str]:
    """What this context names for any of `rooms`: backends, peers, `auto`."""
    binding = _bound()
    return {binding.get(room) or binding.get("*", "auto") for room in rooms}


def rooms() -> list[str]:
    """The names of all ops."""
    return sorted({op.room for op in OPS.values()})


def choose(op: Op, device: torch.device, args: tuple) -> str:
    """The backend that serves this call: the bound one, or the first candidate without a reason
    against it.

    Raises:
        NotImplementedError: the bound backend cannot take these inputs.
    """
    if not op.cpu and not op.cuda and op.triton is None:
        return "reference"
    binding = _bound()
    wanted = binding.get(op.room) or binding.get("*", "auto")
    if wanted != "auto":
        if not op.has(wanted):
            return SUBSTITUTE
        reasons = not_supported_reasons(op, wanted, device, args)
        if reasons:
            raise NotImplementedError(_refusal(op, wanted, device, args, reasons))
        return wanted
    for backend in CANDIDATES.get(device.type, ("reference",)):
        if not op.has(backend):
            continue
        reasons = not_supported_reasons(op, backend, device, args)
        if not reasons:
            return backend
        log_once(op.room, backend, "; ".join(reasons))
    raise NotImplementedError(f"{op.name}: no implementation for device {device}")


def not_supported_reasons(op: Op, backend: str, device: torch.device, args: tuple) -> list[str]:
    """Why `backend` cannot serve `op` with `args` on `device`; empty if it can."""
    reasons = _backend_reasons(op, backend, device)
    kernels = "cuda" if backend == "cuda_emulated" else backend
    if not reasons and args and kernels in op.not_supported:
        reasons = op.not_supported[kernels](*args)
    return reasons


def _backend_reasons(op: Op, backend: str, device: torch.device) -> list[str]:
    if backend in COMPILED:
        return _compiled_reasons(op, backend, device)
    if backend == "triton":
        return _triton_reasons(device)
    if backend in PEERS:
        return [
            f"{backend} stands beside the registered op and cannot serve it under torch.compile; "
            "call the op's public function outside of compiled code"
        ]
    return []


_built: dict[tuple[str, str], str | None] = {}


def _compiled_reasons(op: Op, backend: str, device: torch.device) -> list[str]:
    kind = "cuda" if backend == "cuda" else "cpu"
    if device.type != kind:
        return [f"the {backend} kernels take {kind.upper()} tensors, got {device}"]
    if (op.name, backend) not in _built:
        from fastbert import extension

        why = extension.load(COMPILED[backend])
        registered = torch._C._dispatch_has_kernel_for_dispatch_key(
            f"fastbert::{op.name}_{backend}", kind.upper()
        )
        _built[op.name, backend] = None if registered else (why or "not in the compiled part")
    why = _built[op.name, backend]
    if why:
        return [why]
    return _capability_reasons("CUDA", device) if kind == "cuda" else []


def _triton_reasons(device: torch.device) -> list[str]:
    if importlib.util.find_spec("triton") is None:
        return ["triton is not installed; pip install triton"]
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return ["Triton runs CPU tensors only in its interpreter (TRITON_INTERPRET=1)"]
    if device.type not in ("cpu", "cuda"):
        return [f"Triton kernels take CUDA tensors, got {device}"]
    return _capability_reasons("Triton", device) if device.type == "cuda" else []


@functools.cache
def _capability_reasons(language: str, device: torch.device) -> list[str]:
    if torch.version.hip is not None:
        return []
    capability = torch.cuda.get_device_capability(device)
    if capability >= OLDEST_CAPABILITY:
        return []
    have, need = (".".join(map(str, c)) for c in (capability, OLDEST_CAPABILITY))
    return [
        f"{language} kernels need compute capability {need} (bf16 tensor cores), this has {have}"
    ]


def _refusal(op, backend, device, args, reasons) -> str:
    shown = ", ".join(_show(a) for a in args)
    lines = [f"{op.name}: backend {backend!r} cannot take ({shown}): {'; '.join(reasons)}"]
    for other in BACKENDS:
        if other != backend and op.has(other):
            against = not_supported_reasons(op, other, device, args)
            lines.append(f"  {other}: {'; '.join(against) or 'can'}")
    return "\n".join(lines)


def _show(argument) -> str:
    if isinstance(argument, torch.Tensor):
        dtype = str(argument.dtype).removeprefix("torch.")
        return f"{dtype}{tuple(argument.shape)} on {argument.device}"
    return repr(argument)


def log_once(subject: str, choice: str, reason: str) -> None:
    """Logs at INFO that `choice` was passed over for `subject`, the first time for each reason."""
    if not torch.compiler.is_compiling() and (subject, choice, reason) not in _logged:
        _logged.add((subject, choice, reason))
        logger.info("%s: not using %s: %s", subject, choice, reason)


# --- running --------------------------------------------------------------------------------------


def _run(op: Op, args: tuple):
    device = next(a.device for a in args if isinstance(a, torch.Tensor))
    backend = choose(op, device, args)
    count(op.name, backend)
    if backend == "cpu":
        return getattr(torch.ops.fastbert, f"{op.name}_cpu").default(*args)
    function = _python_implementation(op, backend)
    # Each implementation fixes its own dtypes; autocast inside would cast them a second time.
    if autocast_dtype(device) is not None:
        with torch.autocast(device.type, enabled=False):
            return function(*args)
    return function(*args)


def _python_implementation(op: Op, backend: str) -> Callable:
    if backend == "reference":
        return op.reference
    return _imported(op.triton) if backend == "triton" else _cuda_op(op, backend)


def _cuda_op(op: Op, backend: str) -> Callable:
    compiled = getattr(torch.ops.fastbert, f"{op.name}_{backend}").default
    if op.cuda_extra is None:
        return compiled
    _, further = op.cuda_extra
    return lambda *args: compiled(*args, *further(*args))


@functools.cache
def _imported(path: str) -> Callable:
    """The function `"module:function"` names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def count(name: str, backend: str) -> None:
    """Counts one call of `name` served by `backend`; tests assert on these that a path ran.

    Nothing is counted while a graph is traced: the number would become a guard of that graph.
    """
    if not torch.compiler.is_compiling():
        _calls[name, backend] += 1


def counters() -> Counter[tuple[str, str]]:
    """A copy of the calls so far, per (op, backend)."""
    return Counter(_calls)


def needs_grad(*tensors: torch.Tensor | None) -> bool:
    """Whether an op has to record a backward: without one it is called directly."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype autocast gives matmuls on `device`; None where it is off or unknown (meta)."""
    kind = device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def is_symbolic(tensor: torch.Tensor) -> bool:
    """Whether `tensor` has no values the host could read: while a graph is traced, or on meta."""
    return (
        torch.compiler.is_compiling()
        or tensor.device.type == "meta"
        or type(tensor).__name__ == "FakeTensor"
    )


def is_checkable(tensor: torch.Tensor) -> bool:
    """Whether looking at the values costs no wait: on a CPU, outside of graphs."""
    return tensor.device.type == "cpu" and tensor.numel() > 0 and not is_symbolic(tensor)


def refuse_second_order(name: str) -> None:
    """Called at the head of each backward: raises where a graph of the gradient is asked for.

    `once_differentiable` alone lets `create_graph=True` pass in silence when the incoming gradient
    needs no gradient itself, and second-order terms would be missing from the result.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            f"{name}: second-order gradients are not implemented (backward was called with "
            "create_graph=True); use transformers' own model for them"
        )


def describe() -> list[dict]:
    """One row per op and device kind: what `auto` chooses, why others are passed over, and where
    each implementation has been run (`hardware`, `interpreter`, `emulation` or `nowhere`)."""
    rows = []
    for kind, candidates in CANDIDATES.items():
        if kind == "cuda" and not torch.cuda.is_available():
            continue
        device = torch.device(kind)
        for op in OPS.values():
            reasons = {
                backend: not_supported_reasons(op, backend, device, ())
                if op.has(backend)
                else ["not written yet"]
                for backend in candidates
            }
            chosen = next(b for b in candidates if not reasons[b])
            rows.append(
                {
                    "op": op.name,
                    "device": kind,
                    "chosen": chosen,
                    "rejected": {b: r for b, r in reasons.items() if r},
                    "proven": {
                        b: _proven(b) for b in BACKENDS if op.has(b) and b != "cuda_emulated"
                    },
                }
            )
    return rows


def _proven(backend: str) -> str:
    """Where the implementation has run: docs/gpu_results.md records the runs on hardware."""
    return {"triton": "interpreter", "cuda": "emulation"}.get(backend, "hardware")

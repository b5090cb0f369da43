"""One model in several processes, by torch's own means: what is whole where, and what is sent when.

    mode    whole in every process          sent for each optimizer step
    ddp     weights, optimizer state        gradients, all-reduced
    zero1   weights while a step computes   gradients, reduce-scattered; weights, gathered
    fsdp    weights of a layer at work      gradients; weights for each forward and backward pass

`zero1` is FSDP2 that keeps weights whole until the step ends (Rajbhandari et al. 2020, section 5:
the optimizer state in parts, at no more traffic than ddp). torch's ZeroRedundancyOptimizer has the
same purpose, but deals out whole tensors, so that an embedding decides the largest part, and its
state has to be collected in one process to be saved; FSDP2's is saved in parts and loaded by any
number of processes.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers.modeling_layers import GradientCheckpointingLayer

from fastbert.train.config import ParallelConfig
from fastbert.train.processes import Processes


def distribute(
    model: nn.Module,
    config: ParallelConfig,
    processes: Processes,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """The model as the step calls it; itself where there is one process.

    `zero1` and `fsdp` replace the parameters, so optimizers are made afterwards.

    Args:
        model: a fastbert head on this process's device.
        config: how.
        processes: which all call this.
        dtype: of autocast, in which FSDP2 then sends weights, too; None: fp32.
    """
    if processes.size == 1:
        return model
    if config.mode == "ddp":
        distributed_model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        if config.reduce_dtype == "bf16":
            distributed_model.register_comm_hook(None, _send_bf16)
        return distributed_model
    device = next(model.parameters()).device
    options = {
        "mesh": init_device_mesh(device.type, (processes.size,)),
        # None: the layers' weights go, the model's own, which the backward pass begins with, stay.
        "reshard_after_forward": None if config.mode == "fsdp" else False,
        # Inputs stay as they are: the number of labels, by which the loss is divided, is one.
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=dtype,
            reduce_dtype=torch.bfloat16 if config.reduce_dtype == "bf16" else torch.float32,
            cast_forward_inputs=False,
        ),
    }
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    for module in [*layers, model]:
        fully_shard(module, **options)
    # Whole until `exchanging` ends, over all accumulated batches.
    model.set_reshard_after_backward(config.mode == "fsdp")
    return model


def is_distributed(model: nn.Module) -> bool:
    """Whether `model` came from `distribute` among several processes."""
    return isinstance(model, (DistributedDataParallel, FSDPModule))


@contextmanager
def exchanging(model: nn.Module, *, is_due: bool) -> Iterator[None]:
    """In the block, a backward pass exchanges gradients only if that is due."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_due)
        yield
        if is_due:
            _shard(model)
    elif isinstance(model, DistributedDataParallel) and not is_due:
        with model.no_sync():
            yield
    else:
        yield


@contextmanager
def whole_weights(model: nn.Module) -> Iterator[None]:
    """In the block, parts of a model that FSDP2 shards can be called like those of any other.

    Layers gather their weights by themselves; those of the embeddings and heads belong to the
    model's own call.
    """
    if not isinstance(model, FSDPModule):
        yield
        return
    model.unshard()
    try:
        yield
    finally:
        _shard(model)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, of which a process may hold a part or a summand."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _send_bf16(group, bucket: distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    # By its name torch keeps its hook to nccl; gloo sums bf16 as well.
    return bf16_compress_hook(group, bucket)


def _shard(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()

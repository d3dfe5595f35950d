"""Train with several processes: `torchrun --nproc-per-node 2 -m ldm_lite.train ...`.

Each process takes its part of every batch, so a run is the same on any number of them, up to rounding.  In a single
process, which has rank 0 of 1, these functions do nothing.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from ldm_lite.networks import blocks

T = TypeVar("T")


def init() -> None:
    """Join the other processes started by torchrun, if any.  Each takes its own GPU."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        local, num_gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if num_gpus > 1:
            torch.cuda.set_device(local % num_gpus)  # from now on "cuda" is this GPU
        # NCCL needs a GPU for each process; gloo takes any tensors, but is slow.
        fits = dist.is_nccl_available() and 0 < int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= num_gpus
        dist.init_process_group("cpu:gloo,cuda:nccl" if fits else "gloo")


def world_size() -> int:
    """Number of processes."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Number of this process.  Process 0 writes the files."""
    return dist.get_rank() if world_size() > 1 else 0


def parallel(module: nn.Module) -> nn.Module:
    """Return a module whose backward pass averages gradients over processes; in a single process, the module."""
    if world_size() == 1 or any(isinstance(part, FSDPModule) for part in module.modules()):
        return module
    return DistributedDataParallel(module, broadcast_buffers=False, gradient_as_bucket_view=True)


def shard(network: nn.Module) -> None:
    """Divide a network's parameters among all processes, in place; each block has them whole while it runs.

    Their gradients are means over all processes.  Zhao et al. 2023, in torch's second form (`fully_shard`).
    """
    mesh = init_device_mesh(next(network.parameters()).device.type, (world_size(),))
    for block in list(blocks(network)):
        fully_shard(block, mesh=mesh)
    fully_shard(network, mesh=mesh)


def gather(tensor: Tensor) -> Tensor:
    """Return a tensor, which may be divided, as a whole, on the CPU of process 0.  All processes must call it."""
    if not isinstance(tensor, DTensor):
        return tensor
    tensor = tensor.full_tensor()
    return tensor.cpu() if rank() == 0 else tensor.new_empty(0)


def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the tensor, divided among processes as `like` is, if that is divided."""
    if not isinstance(like, DTensor) or isinstance(tensor, DTensor):
        return tensor
    return distribute_tensor(tensor, like.device_mesh, like.placements)


@contextlib.contextmanager
def without_exchange(module: nn.Module) -> Iterator[None]:
    """Within the block backward passes add to the gradients of this process only: for all but a step's last."""
    sharded = [part for part in module.modules() if isinstance(part, FSDPModule)]
    for part in sharded:
        part.set_requires_gradient_sync(False)
    with module.no_sync() if isinstance(module, DistributedDataParallel) else contextlib.nullcontext():
        yield
    for part in sharded:
        part.set_requires_gradient_sync(True)


@torch.no_grad()
def all_reduce_sum(value: Tensor) -> Tensor:
    """Return the sum of a tensor over all processes."""
    if world_size() > 1:
        value = value.clone()
        dist.all_reduce(value)
    return value


def broadcast(answer: T) -> T:
    """Return the answer of process 0 in every process."""
    answers = [answer]
    if world_size() > 1:
        dist.broadcast_object_list(answers)
    return answers[0]


def barrier() -> None:
    """Wait until every process is here."""
    if world_size() > 1:
        dist.barrier()


@contextlib.contextmanager
def reported_peers() -> Iterator[None]:
    """Turn the errors of torch for a process that is gone into a ChildProcessError of one line."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        raise ChildProcessError(
            f"process {rank()} of {world_size()} lost the others ({str(error).splitlines()[0]:.100}): the state of the "
            "last save is kept, `resume=True` continues, on any number of processes"
        ) from error

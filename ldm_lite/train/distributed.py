"""One run by several processes, each with batches of its own: `torchrun --nproc-per-node 2 -m ldm_lite.train ...`.

The gradients of a step are the mean over the processes, so that a step is one of as many times the batch.  A process
alone has rank 0 of 1, and nothing here does anything.
"""

import os
from collections.abc import Sequence

import torch
from torch import Tensor
from torch import distributed as dist


def join() -> None:
    """Meet the other processes that torchrun has started, if there are any; each takes a GPU of its own."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        local, num_gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if num_gpus > 1:
            torch.cuda.set_device(local % num_gpus)  # what "cuda" is from now on: each process has a GPU of its own
        # NCCL wants a GPU for each process; gloo takes any tensors, if slowly.
        fits = dist.is_nccl_available() and 0 < int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= num_gpus
        dist.init_process_group("cpu:gloo,cuda:nccl" if fits else "gloo")


def count() -> int:
    """Number of processes."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def own() -> int:
    """The number of this process; 0 writes the files."""
    return dist.get_rank() if count() > 1 else 0


@torch.no_grad()
def average_gradients(parameters: Sequence[Tensor]) -> None:
    """Give every process the mean of all processes' gradients."""
    grads = [p.grad for p in parameters if p.grad is not None] if count() > 1 else []
    if grads:
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat)
        flat /= count()
        first = 0
        for grad in grads:
            grad.copy_(flat[first : first + grad.numel()].view_as(grad))
            first += grad.numel()


def agreed(answer: bool) -> bool:
    """The first process's answer, for all."""
    answers = [answer]
    if count() > 1:
        dist.broadcast_object_list(answers)
    return answers[0]


def wait() -> None:
    """Until every process is here."""
    if count() > 1:
        dist.barrier()

"""Train with several processes: `torchrun --nproc-per-node 2 -m ldm_lite.train ...`.

Each process has its own batches.  A step uses the mean of all gradients, so the effective batch grows with the
number of processes.  In a single process, which has rank 0 of 1, these functions do nothing.
"""

import os
from collections.abc import Sequence

import torch
from torch import Tensor
from torch import distributed as dist


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


@torch.no_grad()
def average_gradients(parameters: Sequence[Tensor]) -> None:
    """Replace each gradient by its mean over all processes."""
    grads = [p.grad for p in parameters if p.grad is not None] if world_size() > 1 else []
    if grads:
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat)
        flat /= world_size()
        first = 0
        for grad in grads:
            grad.copy_(flat[first : first + grad.numel()].view_as(grad))
            first += grad.numel()


def broadcast(answer: bool) -> bool:
    """Return the answer of process 0 in every process."""
    answers = [answer]
    if world_size() > 1:
        dist.broadcast_object_list(answers)
    return answers[0]


def barrier() -> None:
    """Wait until every process is here."""
    if world_size() > 1:
        dist.barrier()

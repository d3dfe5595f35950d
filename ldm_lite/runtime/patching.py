"""Other forwards for the modules of a network: set, found again, and undone.

A patch is a function of the module and its arguments, bound to the module.  A deep copy of a patched module is
patched too and computes with its own weights, and so is one that was pickled.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

from torch import Tensor, nn

Function = Callable[..., Any]  # called with the module, then with what its forward gets


class Patch:
    """A function, and the module whose forward it replaces.

    The forward is the method `run`: a method that only the module has, not its class, could be pickled but not
    unpickled.
    """

    def __init__(self, function: Function, module: nn.Module) -> None:
        self.function, self.module = function, module

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function on the module."""
        return self.function(self.module, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Patch":
        return Patch(self.function, copy.deepcopy(self.module, memo))


def kernel(function: Function, is_whole: bool = False) -> Function:
    """Decorate a patch that computes the same as the module's class, from the same arguments.

    A network that has only such patches still runs as written.  With whole=True it computes the module without calling
    all of its parts.
    """
    function.is_kernel, function.is_whole = True, is_whole  # type: ignore[attr-defined]
    return function


def is_kernel(function: Function | None) -> bool:
    """Whether a patch computes the same as its module's class."""
    return getattr(function, "is_kernel", False)


def is_whole(function: Function | None) -> bool:
    """Whether a patch does the work of the module's parts without calling them."""
    return getattr(function, "is_whole", False)


def patch(module: nn.Module, function: Function) -> None:
    """Make a module run function(module, *args, **kwargs) as its forward, in place of any earlier patch."""
    module.forward = Patch(function, module).run


def unpatch(module: nn.Module) -> None:
    """Make a module run its class's forward again; other modules stay as they are."""
    vars(module).pop("forward", None)


def patch_of(module: nn.Module) -> Function | None:
    """Return the function that patch() gave this module, or None if patch() did not set its forward."""
    forward = vars(module).get("forward")
    patched = forward.__self__ if isinstance(forward, MethodType) else None
    return patched.function if isinstance(patched, Patch) and patched.module is module else None


def twin(network: nn.Module) -> Any:
    """Return a copy of a network with new modules, the same weights, and the same hooks, patches and attention.

    Its modules can be changed without changing the network; offloaded weights are moved for both.
    """
    shared: list[Any] = [*network.parameters(), *network.buffers()]
    for module in network.modules():
        shared += [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        for name, value in vars(module).items():
            is_of_layer = name == "attention" and hasattr(value, "layer")  # one that changes its layer is copied
            if isinstance(value, Tensor) or (name in ("joined", "part", "attention") and not is_of_layer):
                shared.append(value)
    return copy.deepcopy(network, {id(value): value for value in shared})


def patch_like(network: nn.Module, template: nn.Module) -> None:
    """Patch the modules of a network with the kernels of another network's modules of the same names."""
    theirs = {name: patch_of(module) for name, module in template.named_modules()}
    for name, module in network.named_modules():
        if (function := theirs.get(name)) is not None and is_kernel(function):
            patch(module, function)


@contextlib.contextmanager
def unpatched(module: nn.Module) -> Iterator[None]:
    """Make a module run its class's forward within the block."""
    forward = vars(module).pop("forward", None)
    try:
        yield
    finally:
        if forward is not None:
            module.forward = forward


def is_unmodified(network: nn.Module) -> bool:
    """Whether every module runs its class's forward, or a kernel in place of it, and none has hooks."""
    return all(is_layer_unmodified(module) for module in network.modules())


def is_layer_unmodified(module: nn.Module) -> bool:
    """Whether a module runs its class's forward, or a kernel in place of it, and has no hooks; its parts may differ."""
    if module._forward_pre_hooks or module._forward_hooks:
        return False
    return "forward" not in vars(module) or is_kernel(patch_of(module))

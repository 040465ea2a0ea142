"""A stand-in for a GPU: its tensors lie in main memory, and what CUDA refuses to mix with the CPU's is refused.

For a process of its own, since torch knows a device until it ends. Numbers are those of the CPU, without gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from peft.utils import save_and_load
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

NAME = "fake"
_MOVES = ("aten::_to_copy", "aten::copy_", "aten::to")
_AT_PLACES = ("aten::index", "aten::_index_put_impl_")
_inner: Any = torch._C
_CPU = torch.device("cpu")


class _Fake(Tensor):
    """A tensor that says it is on the device, and what it holds."""

    held: Tensor
    __torch_function__ = _inner._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor) -> _Fake:
        made: Any = Tensor
        kept = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        found: _Fake = made._make_wrapper_subclass(cls, held.size(), device=torch.device(f"{NAME}:0"), **kept)
        found.held = held
        return found

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _compute(func, args, kwargs or {})

    def tolist(self) -> Any:
        return self.held.tolist()


class _Made(TorchDispatchMode):
    """Tensors that are asked for on the device are made there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})


@contextmanager
def fake_device() -> Iterator[None]:
    """Have torch know the device, and use it within the block; adapters are read there as on a GPU."""
    backend_registration._setup_privateuseone_for_python_backend(NAME)
    files: Any = save_and_load
    read = files.safe_load_file
    with pytest.MonkeyPatch.context() as patch, _Made():
        patch.setattr(torch.__future__, "get_overwrite_module_params_on_conversion", lambda: True)
        patch.setattr(files, "safe_load_file", lambda path, device: tree_map_only(Tensor, _mover(device), read(path)))
        _inner._set_only_lift_cpu_tensors(True)  # `torch.tensor` makes it in main memory and moves it
        yield


def _mover(device: str) -> Any:
    return lambda each: each.to(device)


def _compute(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    name, leaves = func._schema.name, tree_leaves((args, kwargs))
    _refuse(name, args, [each for each in leaves if isinstance(each, Tensor)], kwargs.get("generator"))
    asked = [each for each in leaves if isinstance(each, torch.device)]
    ours = [each for each in leaves if isinstance(each, _Fake)]
    is_ours = asked[0].type == NAME if asked else bool(ours) and (name != "aten::copy_" or isinstance(args[0], _Fake))
    plain = tree_map_only(torch.device, lambda each: _CPU, tree_map_only(_Fake, lambda each: each.held, (args, kwargs)))
    known = {id(each.held): each for each in ours}
    found = func(*plain[0], **plain[1])
    if not is_ours:
        return found
    return tree_map_only(Tensor, lambda each: known[id(each)] if id(each) in known else _Fake(each), found)


def _refuse(name: str, args: Sequence[Any], given: Sequence[Tensor], generator: torch.Generator | None) -> None:
    """Raise what CUDA raises where tensors of both places meet."""
    ours = [each for each in given if isinstance(each, _Fake)]
    if ours and generator is not None and generator.device == _CPU:
        raise RuntimeError(f"Expected a '{NAME}' device type for generator but found 'cpu'")
    theirs = [each for each in given if not isinstance(each, _Fake) and each.dim()]
    if not (ours and theirs) or name in _MOVES:
        return
    if not name.startswith(_AT_PLACES):
        raise RuntimeError(f"Expected all tensors to be on the same device, but {name} has some of each")
    if not isinstance(args[0], _Fake):
        raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")

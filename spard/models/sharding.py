"""A model whose weights are cut over the ranks of a run (FSDP2): a layer is whole while it computes, and no longer.

`full` cuts over all ranks. `hybrid` cuts over those of one machine and keeps a copy on each machine, so that no weight
crosses the network: of a LoRA run only the adapter's gradients do. LoRA layers that are added later stay whole on every
rank. A model with cut weights answers only where all ranks make the same passes.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM

from spard import distributed
from spard.config.sharding import Sharding
from spard.errors import InvalidRecipe
from spard.models.peft import tuners_utils

_from_config: Any = AutoModelForCausalLM.from_config


def shard_(model: Any, sharding: Sharding, device: torch.device) -> None:
    """Cut the weights of a whole model in place, and bring each rank's part to its device.

    They stay whole in a run on one process, or for "none". Of a model that is cut already, what a pass through a part
    of it has left whole is given back. Raises `InvalidRecipe` for a model without a list of layers.
    """
    if is_sharded(model):
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return
    if sharding == "none" or distributed.world_size() == 1:
        model.to(device)
        return
    _cut(model, _mesh(sharding, device))
    model.to(device)


def _cut(model: Any, mesh: DeviceMesh) -> None:
    decoder = model.get_decoder()
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, torch.nn.ModuleList):
        raise InvalidRecipe("sharding: this model has no list of layers that could be cut", "recipe.sharding")
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = [embeddings, head] if head.weight is embeddings.weight else head
    fully_shard(tied, mesh=mesh, reshard_after_forward=True)
    fully_shard(decoder, mesh=mesh, reshard_after_forward=True)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # losses are divided by the tokens of all ranks already
            module.set_force_sum_reduction_for_comms(True)


def inference(model: Any) -> AbstractContextManager[Any]:
    """Compute without gradients inside the block; what a cut model gathers there has to be of use to training too."""
    return torch.no_grad() if is_sharded(model) else torch.inference_mode()


def is_sharded(model: Any) -> bool:
    """Whether weights of the model are cut."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


class Shards(list[Tensor]):
    """This rank's parts of all trained weights, in place, where these are cut themselves: full fine-tuning.

    What is computed coordinate by coordinate, an optimizer's step among it, is the same on the parts.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        if not all(isinstance(each, DTensor) for each in parameters):
            raise InvalidRecipe("sharding: this model has weights outside of its layers", "recipe.sharding")
        self.parameters = [each for each in parameters if isinstance(each, DTensor)]
        super().__init__(own_part(each.detach()) for each in self.parameters)

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that hold parts of one and the same copy."""
        mesh = self.parameters[0].device_mesh
        return mesh.get_group(mesh.ndim - 1)

    def gradient(self, loss: Tensor) -> list[Tensor]:
        """Return this rank's parts of dL/dtheta, L being the sum of the losses of all ranks."""
        loss.backward()  # type: ignore[no-untyped-call]
        found = [torch.zeros_like(own) if each.grad is None else own_part(each.grad) for own, each in self._pairs()]
        for each in self.parameters:
            each.grad = None
        return found

    def join_part(self, place: int, part: Tensor) -> DTensor:
        """Return a tensor that is cut as the parameter at a place is, from this rank's part of it."""
        of = self.parameters[place]
        return DTensor.from_local(
            part, of.device_mesh, of.placements, run_check=False, shape=of.shape, stride=of.stride()
        )

    def _pairs(self) -> Iterator[tuple[Tensor, DTensor]]:
        return zip(self, self.parameters, strict=True)


def copy_model(model: Any) -> Any:
    """Return a second model with the weights of a first one as they are, cut in the same way."""
    return _cut_anew(model, model.dtype) if is_sharded(model) else copy.deepcopy(model)


def retype_(model: Any, dtype: torch.dtype) -> None:
    """Give a model weights of another type, in place.

    A cut model gets new parts: FSDP goes on gathering in the type that weights had at the first pass.
    """
    if not is_sharded(model):
        model.to(dtype)
    elif model.dtype != dtype:
        second = _cut_anew(model, dtype).train(model.training)
        for name, part in second.named_children():
            setattr(model, name, part)


def _cut_anew(model: Any, dtype: torch.dtype) -> Any:
    """Return a second cut model with the weights of a first one in a type."""
    with init_empty_weights(include_buffers=False):
        second: Any = _from_config(model.config, dtype=dtype)
    first = next(part for part in model.parameters() if isinstance(part, DTensor))
    _cut(second, first.device_mesh)
    weights = {name: part.detach().to(dtype, copy=True) for name, part in model.state_dict().items()}
    second.load_state_dict(weights, assign=True)
    second.tie_weights()
    return second.to(first.device)


def shard_like(part: Tensor, like: Tensor) -> Tensor:
    """Return a whole tensor cut as another one is; as it is where that one is not."""
    if not isinstance(like, DTensor):
        return part
    return distribute_tensor(part, like.device_mesh, like.placements, src_data_rank=None)


def own_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor; all of it where it is not cut."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(part: Tensor) -> Tensor:
    """Return a weight in one piece, which all ranks have to ask for at once."""
    return part.full_tensor() if isinstance(part, DTensor) else part


def whole_weights(model: Any) -> dict[str, Tensor] | None:
    """Return the whole weights of a cut model on the first rank's CPU; None of one that is not cut."""
    if not is_sharded(model):
        return None
    found = dict[str, Tensor]()
    for name, part in model.state_dict().items():
        weight = whole(part.detach()).cpu()
        if distributed.rank() == 0:
            found[name] = weight
    return found


@contextmanager
def whole_sizes() -> Iterator[None]:
    """Let PEFT size its layers for whole weights inside the block.

    It takes a mesh with names of its own, as `hybrid` needs one, for tensor parallelism, where a layer computes with
    its part alone.
    """
    known = tuners_utils._torch_supports_distributed
    tuners_utils._torch_supports_distributed = False
    try:
        yield
    finally:
        tuners_utils._torch_supports_distributed = known


def _mesh(sharding: Sharding, device: torch.device) -> DeviceMesh:
    count = distributed.world_size()
    inside = int(os.environ.get("LOCAL_WORLD_SIZE", count)) if sharding == "hybrid" else count
    if inside == count:
        return init_device_mesh(device.type, (count,))
    return init_device_mesh(device.type, (count // inside, inside), mesh_dim_names=("machine", "gpu"))

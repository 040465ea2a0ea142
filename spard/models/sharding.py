"""Models sharded over the ranks of a run (FSDP2): a layer is gathered only while it computes.

`full` shards over all ranks. `hybrid` shards within each machine and keeps one copy per machine, which keeps weights
off the network: a LoRA run sends only the adapter's gradients. LoRA layers added later are replicated on every rank. A
sharded model only works if all ranks make the same passes.
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
from spard.config.settings import Sharding
from spard.errors import InvalidRecipe
from spard.models.peft import tuners_utils

_from_config: Any = AutoModelForCausalLM.from_config


def shard_(model: Any, sharding: Sharding, device: torch.device) -> None:
    """Shard a whole model in place and move each rank's shard to its device.

    With one process or "none" the model is moved whole. A model that is already sharded frees the layers that a partial
    pass has left gathered. Raises `InvalidRecipe` for a model without a list of layers.
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
    # Tied weights are one parameter, which FSDP can manage in one group only.
    tied = [embeddings, head] if head.weight is embeddings.weight else head
    fully_shard(tied, mesh=mesh, reshard_after_forward=True)
    fully_shard(decoder, mesh=mesh, reshard_after_forward=True)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # losses are already divided by the tokens of all ranks
            module.set_force_sum_reduction_for_comms(True)


def inference(model: Any) -> AbstractContextManager[Any]:
    """Return a context without gradients; `no_grad` for sharded models, whose gathered weights training uses again."""
    return torch.no_grad() if is_sharded(model) else torch.inference_mode()


def is_sharded(model: Any) -> bool:
    """Return True if the model's weights are sharded."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


class Shards(list[Tensor]):
    """This rank's local parts of all trained weights, for full fine-tuning of a sharded model.

    Elementwise computations such as an optimizer's step work on the parts unchanged.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        if not all(isinstance(each, DTensor) for each in parameters):
            raise InvalidRecipe("sharding: this model has weights outside of its layers", "recipe.sharding")
        self.parameters = [each for each in parameters if isinstance(each, DTensor)]
        super().__init__(own_part(each.detach()) for each in self.parameters)

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of the ranks that together hold one copy."""
        mesh = self.parameters[0].device_mesh
        return mesh.get_group(mesh.ndim - 1)

    def gradient(self, loss: Tensor) -> list[Tensor]:
        """Return this rank's parts of dL/dtheta, where L is the sum of all ranks' losses."""
        # `torch.autograd.grad` bypasses FSDP's hooks, which reduce the gradients; `backward` runs them.
        loss.backward()  # type: ignore[no-untyped-call]
        found = [torch.zeros_like(own) if each.grad is None else own_part(each.grad) for own, each in self._pairs()]
        for each in self.parameters:
            each.grad = None
        return found

    def join_part(self, place: int, part: Tensor) -> DTensor:
        """Return a distributed tensor, sharded like the parameter at index `place`, from this rank's part."""
        of = self.parameters[place]
        return DTensor.from_local(
            part, of.device_mesh, of.placements, run_check=False, shape=of.shape, stride=of.stride()
        )

    def _pairs(self) -> Iterator[tuple[Tensor, DTensor]]:
        return zip(self, self.parameters, strict=True)


def copy_model(model: Any) -> Any:
    """Return a second model with equal weights, sharded in the same way."""
    return _cut_anew(model, model.dtype) if is_sharded(model) else copy.deepcopy(model)


def retype_(model: Any, dtype: torch.dtype) -> None:
    """Convert a model's weights to another dtype, in place.

    A sharded model gets new modules: FSDP keeps gathering in the dtype of the first pass.
    """
    if not is_sharded(model):
        model.to(dtype)
    elif model.dtype != dtype:
        second = _cut_anew(model, dtype).train(model.training)
        for name, part in second.named_children():
            setattr(model, name, part)


def _cut_anew(model: Any, dtype: torch.dtype) -> Any:
    """Return a second sharded model with the weights of the first one in another dtype."""
    # Created without memory: its weights are replaced by those of the first model below.
    with init_empty_weights(include_buffers=False):
        second: Any = _from_config(model.config, dtype=dtype)
    first = next(part for part in model.parameters() if isinstance(part, DTensor))
    _cut(second, first.device_mesh)
    weights = {name: part.detach().to(dtype, copy=True) for name, part in model.state_dict().items()}
    second.load_state_dict(weights, assign=True)
    second.tie_weights()
    return second.to(first.device)


def shard_like(part: Tensor, like: Tensor) -> Tensor:
    """Return a whole tensor sharded like another one; unchanged if that one is not sharded."""
    if not isinstance(like, DTensor):
        return part
    return distribute_tensor(part, like.device_mesh, like.placements, src_data_rank=None)


def own_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, or the tensor itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(part: Tensor) -> Tensor:
    """Return a weight gathered from all ranks; all of them must call this function at once."""
    return part.full_tensor() if isinstance(part, DTensor) else part


def whole_weights(model: Any) -> dict[str, Tensor] | None:
    """Return the gathered weights of a sharded model on rank 0's CPU ({} elsewhere); None if not sharded."""
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
    """Make PEFT size its layers for whole weights inside the block.

    PEFT mistakes a mesh with dimension names, which `hybrid` needs, for tensor parallelism, in which a layer computes
    with its shard alone.
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

"""Products with frozen float32 weights on AMD's CPUs with AVX-512, by oneDNN in place of MKL.

PyTorch computes float32 products on CPUs by MKL, which uses half of the vector width of these CPUs. oneDNN, which
PyTorch brings along, uses all of it: two to three times as many operations a second, without another copy of the
weights. Results differ by rounding. Other CPUs, dtypes and small layers keep PyTorch's own way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from spard.config.cpu import prefers_onednn

LEAST_WEIGHTS = 2**16  # of a layer: a call of oneDNN costs 20 microseconds more, which small layers do not make good


class _Product(torch.autograd.Function):
    """The product of inputs `[..., I]` with frozen weights `[O, I]`, plus a frozen bias `[O]` if there is one."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight_OI)
        return _multiply(inputs, weight_OI, bias_O)

    @staticmethod
    @once_differentiable  # oneDNN's product has no gradient of its own
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        (weight_OI,) = ctx.saved_tensors
        return _multiply(gradients[0], weight_OI.t(), None), None, None


class WideLinear(nn.Linear):
    """A linear layer whose weights go through oneDNN as long as they are frozen."""

    def forward(self, input: Tensor) -> Tensor:
        """Return `input @ weight.T + bias`, `[..., O]`; see `torch.nn.Linear`."""
        is_plain = input.dtype == self.weight.dtype == torch.float32 and input.device.type == "cpu"
        if not is_plain or not input.numel() or torch.is_autocast_enabled("cpu"):
            return super().forward(input)
        if not torch.is_grad_enabled() or not (self.weight.requires_grad or input.requires_grad):
            return _multiply(input, self.weight, self.bias)
        if self.weight.requires_grad or (self.bias is not None and self.bias.requires_grad):
            return super().forward(input)
        found: Tensor = _Product.apply(input, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return found


def widen_products_(model: nn.Module) -> None:
    """Let the large linear layers of a model on a CPU use oneDNN where that is faster; others are left as they are."""
    # PyTorch can be built without oneDNN.
    is_there: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not (is_there and prefers_onednn()):
        return
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.numel() >= LEAST_WEIGHTS:
            # The class, not the method: a copy of the model must have methods of its own.
            module.__class__ = WideLinear


def _multiply(inputs: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    found: Tensor = torch.ops.mkldnn._linear_pointwise(inputs.contiguous(), weight_OI, bias_O, "none", [], "")
    return found

"""Measure what a training computes: floating-point operations from the passes that its model makes, and energy.

Hooks on the decoder and on the head see each forward and each backward pass with its padded tokens. A pass costs, with
n = rows x length padded tokens, W weights in the decoder's matrix products and A in those of the adapter:

    forward    2 n (W + A) + a                   a = 4 layers heads head_dim rows length^2, for attention
    backward   2 n (W + A) + 2 n T + 2 a         T = the trained ones among W + A; once more the whole forward pass
                                                 where gradient checkpointing repeats most of it
    head       2 D V for each state that it gets, as much backward, and as much again where it is trained

That is Kaplan et al., "Scaling Laws for Neural Language Models" (2020), section 2.1, with the backward pass split into
gradients of activations and of weights, because an adapter needs the latter for itself alone. Of a mixture of experts
the weights count that one token passes through. Attention is counted over whole rows: neither the causal mask nor a
sliding window is taken off. Norms, activations, the optimizer and the selection of rows are not counted; together they
are below one percent of a language model. `tests/spard/test_operations.py` holds the count to that of
`torch.utils.flop_counter`.

Energy is what processors and GPUs used, where this machine's counters can be read.

Processors: RAPL through `/sys/class/powercap`, one zone `intel-rapl:N` for each package (AMD's too, from Linux 5.8),
microjoules in `energy_uj` that begin anew at `max_energy_range_uj`. The kernel lets only root read it since 2020
(CVE-2020-8694), and virtual machines have none. GPUs: NVML's counter of millijoules since the driver was loaded, from
Volta on (`nvmlDeviceGetTotalEnergyConsumption`). Both count whole devices: whatever else runs on them is in the figure.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from spard.models.peft import BaseTunerLayer


@dataclass(frozen=True, slots=True)
class Compute:
    """The operations, tokens and energy of a training on all its processes (`spard.training.compute`).

    operations       floating-point operations; None if a version that does not count them made a part of the run
    forward_tokens   padded tokens of the forward passes
    backward_tokens  padded tokens of the backward passes
    energy_j         joules by device, for devices of the first node; empty if no counter could be read
    energy_missing   for each device without a figure, the reason
    """

    operations: int | None
    forward_tokens: int
    backward_tokens: int
    energy_j: Mapping[str, float]
    energy_missing: tuple[str, ...] = ()


_EXPERTS = re.compile(r"(^|\.)experts(\.|$)")
_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
_ADAPTER = ".lora_"


@dataclass(frozen=True, slots=True)
class PassCost:
    """The cost of a pass in multiply-adds: for each token, each pair of tokens of a row, and each state of the head.

    weights    number of weights in the decoder's matrix products for one token, without the adapter
    adapter    number of weights in the adapter's matrix products
    trained    number of both kinds of weights that get gradients
    attention  multiply-adds for each pair of tokens of a row
    head       D x V
    head_trained  True if the head gets gradients
    """

    weights: int
    adapter: int
    trained: int
    attention: int
    head: int
    head_trained: bool

    @classmethod
    def from_model(cls, model: Any) -> PassCost:
        """Read the sizes of a model in training, with its adapter if it has one."""
        config, decoder, head = model.config.get_text_config(), model.get_decoder(), model.get_output_embeddings()
        found, adapter, trained = 0, 0, 0
        for name, size, is_trained in _matrix_products(decoder, _active_share(config)):
            found, adapter = (found, adapter + size) if _ADAPTER in f".{name}" else (found + size, adapter)
            trained += size if is_trained else 0
        heads = int(config.num_attention_heads)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        return cls(
            weights=found,
            adapter=adapter,
            trained=trained,
            attention=2 * int(config.num_hidden_layers) * heads * int(head_dim),
            head=_product(head) if head is not None else 0,
            head_trained=any(part.requires_grad for part in head.parameters()) if head is not None else False,
        )

    def forward(self, rows: int, length: int, *, has_adapter: bool, before: int = 0) -> int:
        """Return the operations of the decoder's forward pass over padded rows.

        `before` counts the tokens of each row whose keys and values are in a cache already.
        """
        products = self.weights + (self.adapter if has_adapter else 0)
        return 2 * rows * length * (products + self.attention * (before + length))

    def backward(self, rows: int, length: int, before: int = 0) -> int:
        """Return the operations of the decoder's backward pass over padded rows; the adapter is always enabled then."""
        products = self.weights + self.adapter + self.trained
        return 2 * rows * length * (products + 2 * self.attention * (before + length))


class OperationCounter:
    """Counts the passes of a model inside `counting` blocks; `close` removes the hooks.

    operations       operations since the counter was made; a resumed run sets the number of its earlier attempts
    forward_tokens   padded tokens of the forward passes through the decoder
    backward_tokens  padded tokens of the backward passes
    """

    def __init__(self, model: Any, *, checkpointing: bool) -> None:
        self.operations, self.forward_tokens, self.backward_tokens = 0, 0, 0
        self._cost, self._checkpointing, self._is_counting = PassCost.from_model(model), checkpointing, False
        layers = (module for module in model.modules() if isinstance(module, BaseTunerLayer))
        self._adapted: Any = next(layers, None)
        decoder, head = model.get_decoder(), model.get_output_embeddings()
        self._handles = [decoder.register_forward_hook(self._see_decoder, with_kwargs=True)]
        if head is not None:
            self._handles.append(head.register_forward_hook(self._see_head))

    def __deepcopy__(self, memo: Any) -> OperationCounter:
        """Return a counter that also counts passes of the model's copy, which some defenses compare with the model."""
        return self

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the passes inside the block."""
        self._is_counting = True
        try:
            yield
        finally:
            self._is_counting = False

    def close(self) -> None:
        """Remove the hooks from the model."""
        for handle in self._handles:
            handle.remove()

    def _see_decoder(self, module: nn.Module, inputs: Any, named: Mapping[str, Any], output: Any) -> None:
        states: Tensor = output[0]
        if not self._is_counting:
            return
        rows, length = int(states.shape[0]), int(states.shape[1])
        cache = named.get("past_key_values")
        before = int(cache.get_seq_length()) - length if cache is not None else 0
        has_adapter = self._adapted is not None and not self._adapted.disable_adapters
        forward = self._cost.forward(rows, length, has_adapter=has_adapter, before=before)
        self.operations += forward
        self.forward_tokens += rows * length
        if states.requires_grad:
            repeated = forward if self._checkpointing else 0
            backward = self._cost.backward(rows, length, before) + repeated

            def count(gradient: Tensor) -> None:
                self.operations += backward
                self.backward_tokens += rows * length

            states.register_hook(count)  # type: ignore[no-untyped-call]

    def _see_head(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if not self._is_counting:
            return
        operations = 2 * self._cost.head * prod(output.shape[:-1])
        self.operations += operations
        if output.requires_grad:

            def count(gradient: Tensor) -> None:
                self.operations += operations * (2 if self._cost.head_trained else 1)

            output.register_hook(count)  # type: ignore[no-untyped-call]


def _matrix_products(decoder: Any, share: float) -> Iterator[tuple[str, int, bool]]:
    """Yield each matrix product: its path, its number of weights for one token, and True if they are trained."""
    for name, module in decoder.named_modules():
        part = share if _EXPERTS.search(name) else 1.0
        if isinstance(module, nn.Linear | Conv1D):
            yield name, int(_product(module) * part), any(each.requires_grad for each in module.parameters())
        elif _EXPERTS.search(name):
            for key, weight in module.named_parameters(recurse=False):
                if weight.ndim == 3:  # the weights of all experts in one tensor
                    yield f"{name}.{key}", int(weight.numel() * part), weight.requires_grad


def _product(module: Any) -> int:
    if isinstance(module, Conv1D):
        return int(module.nx * module.nf)
    if isinstance(module, nn.Linear):
        return module.in_features * module.out_features
    return int(module.weight.numel())


def _active_share(config: Any) -> float:
    """Return the share of a mixture's experts that one token passes through; 1 if the model is no mixture."""
    experts = next((count for name in _EXPERT_COUNTS if (count := getattr(config, name, None))), None)
    active = getattr(config, "num_experts_per_tok", None)
    return min(1.0, active / experts) if experts and active else 1.0


POWERCAP = Path("/sys/class/powercap")
_RAPL = "intel-rapl:"
_LIBRARY = "libnvidia-ml.so.1"


@dataclass(slots=True)
class EnergyCounter:
    """One device's counter: `read` returns joules that only grow, or begin anew at `range_j` where it is not None."""

    name: str
    read: Callable[[], float]
    range_j: float | None = None
    last: float = 0.0

    def consumed_joules(self) -> float:
        """Return the joules since the last call; the counter may have begun anew once."""
        now = self.read()
        grown = now - self.last + (self.range_j if self.range_j and now < self.last else 0.0)
        self.last = now
        return max(0.0, grown)


class EnergyMeter:
    """All energy counters of this machine that can be read; `missing` says why the others cannot."""

    def __init__(self, powercap: Path = POWERCAP, gpus: Iterable[int] | None = None) -> None:
        processors, why = _rapl_counters(powercap)
        devices, why_gpus = _nvml_counters(range(torch.cuda.device_count()) if gpus is None else gpus)
        self._counters = [*processors, *devices]
        self.missing = [reason for reason in (why, why_gpus) if reason]
        for each in self._counters:
            each.last = each.read()

    def consumed_joules(self) -> dict[str, float]:
        """Return the joules by device since the last call, or since the meter was made; call it every few minutes."""
        found: dict[str, float] = {}
        for each in list(self._counters):
            try:
                found[each.name] = each.consumed_joules()
            except (OSError, ValueError) as error:
                self._counters.remove(each)
                self.missing.append(f"{each.name}: its counter could not be read any more ({error})")
        return found


def _rapl_counters(powercap: Path) -> tuple[list[EnergyCounter], str | None]:
    """Return the counters of the processors' packages, and why there are none."""
    zones = sorted(each for each in powercap.glob(f"{_RAPL}*") if each.name.count(":") == 1)
    if not zones:
        return [], f"processor: {powercap} has no zone {_RAPL}N (no RAPL, a virtual machine, or not let through)"
    found = list[EnergyCounter]()
    for zone in zones:
        try:
            counter = _rapl_counter(zone)
            counter.read()
        except (OSError, ValueError) as error:
            name = error.strerror if isinstance(error, OSError) else error
            return [], f"processor: {zone / 'energy_uj'} cannot be read ({name}); the kernel lets only root read it"
        found.append(counter)
    return found, None


def _rapl_counter(zone: Path) -> EnergyCounter:
    name = (zone / "name").read_text().strip()
    most = float((zone / "max_energy_range_uj").read_text())

    def read() -> float:
        return float((zone / "energy_uj").read_text()) / 1e6

    return EnergyCounter(f"{zone.name} {name}", read, most / 1e6)


def _nvml_counters(gpus: Iterable[int]) -> tuple[list[EnergyCounter], str | None]:
    """Return the counters of this process's GPUs, by their numbers in torch, and why there are none if it has GPUs."""
    wanted = [str(torch.cuda.get_device_properties(each).uuid) for each in gpus]
    if not wanted:
        return [], None
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        return [], f"GPU: {_LIBRARY} cannot be loaded"
    if library.nvmlInit_v2():
        return [], "GPU: NVML does not start"
    found = list[EnergyCounter]()
    for uuid in wanted:
        handle, name = ctypes.c_void_p(), uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        if library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle)):
            return [], f"GPU: NVML does not know {name}"
        counter = EnergyCounter(name, _nvml_reader(library, handle))
        with suppress(OSError):
            counter.read()
            found.append(counter)
    has_all = len(found) == len(wanted)
    return found, None if has_all else "GPU: NVML has no energy counter for it (older than Volta, MIG)"


def _nvml_reader(library: ctypes.CDLL, handle: ctypes.c_void_p) -> Callable[[], float]:
    def read() -> float:
        millijoules = ctypes.c_ulonglong()
        status = library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules))
        if status:
            raise OSError(f"NVML's error {status}")
        return millijoules.value / 1e3

    return read

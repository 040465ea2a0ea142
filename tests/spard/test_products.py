"""Products by oneDNN are those of PyTorch up to rounding, and only frozen float32 layers of some size have them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from spard.config import cpu
from spard.models import products
from spard.models.base import load_base
from spard.models.products import WideLinear, widen_products_
from tests.spard.parts import write_model

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")
WIDTH = 256  # squared, it is the size of the smallest layer that is widened


@pytest.fixture(autouse=True)
def cpu_that_prefers_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "prefers_onednn", lambda: True)


@pytest.fixture
def inputs() -> Tensor:
    return torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(1))


def make_pair(change: Callable[[nn.Linear], object] | None = None, *, bias: bool = True) -> tuple[nn.Linear, nn.Linear]:
    """Return a layer as PyTorch has it, and a widened copy; both are frozen, and then changed."""
    torch.manual_seed(0)
    plain = nn.Linear(WIDTH, 300, bias=bias).requires_grad_(requires_grad=False)
    wide = copy.deepcopy(plain)
    widen_products_(wide)
    assert type(wide) is WideLinear
    for layer in (plain, wide) if change else ():
        change(layer)  # type: ignore[misc]
    return plain, wide


@pytest.mark.parametrize("bias", [True, False])
def test_outputs_and_gradients_are_those_of_a_linear_layer(inputs: Tensor, bias: bool) -> None:
    found = []
    for layer in make_pair(bias=bias):
        given = inputs.transpose(0, 1).clone().requires_grad_()  # rows that do not lie one after the other
        output = layer(given.transpose(0, 1))
        (output**2).sum().backward()
        found.append((output.detach(), given.grad))
    (plain, plain_gradient), (wide, wide_gradient) = found
    assert plain_gradient is not None
    torch.testing.assert_close(wide, plain)
    torch.testing.assert_close(wide_gradient, plain_gradient, rtol=1e-5, atol=1e-4)


def test_without_gradients_it_makes_no_difference_whether_weights_are_frozen(inputs: Tensor) -> None:
    plain, wide = make_pair(lambda layer: layer.requires_grad_(requires_grad=True))
    with torch.no_grad():
        torch.testing.assert_close(wide(inputs), plain(inputs))


def test_weights_in_training_get_their_gradients(inputs: Tensor) -> None:
    plain, wide = make_pair(lambda layer: layer.requires_grad_(requires_grad=True))
    for layer in (plain, wide):
        layer(inputs).sum().backward()
    for name in ("weight", "bias"):
        assert torch.equal(getattr(wide, name).grad, getattr(plain, name).grad)


def test_other_dtypes_and_no_rows_go_pytorch_s_way(inputs: Tensor) -> None:
    plain, wide = make_pair()
    assert torch.equal(wide(inputs[:0]), plain(inputs[:0]))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(wide(inputs), plain(inputs))
    assert torch.equal(wide.double()(inputs.double()), plain.double()(inputs.double()))


def test_a_copy_has_weights_of_its_own(inputs: Tensor) -> None:
    _, wide = make_pair()
    twin = copy.deepcopy(wide)
    with torch.no_grad():
        twin.weight.zero_()
    assert float(wide(inputs).std()) > 0.1
    torch.testing.assert_close(twin(inputs), twin.bias.expand(3, 5, 300))


def test_small_layers_and_other_kinds_are_left_alone() -> None:
    class OwnLinear(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH - 1), OwnLinear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    widen_products_(model)
    assert [type(each) for each in model] == [nn.Linear, OwnLinear, WideLinear]


def test_a_pytorch_without_onednn_keeps_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    layer = nn.Linear(WIDTH, WIDTH)
    widen_products_(layer)
    assert type(layer) is nn.Linear


@pytest.mark.parametrize(("vendor", "flags", "is_wide"), [
    ("AuthenticAMD", "fma avx2 avx512f", True),
    ("AuthenticAMD", "fma avx2", False),
    ("GenuineIntel", "fma avx2 avx512f", False),
    (None, "", False),
])  # fmt: skip
def test_a_model_is_widened_on_the_cpus_that_gain(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, vendor: str | None, flags: str, is_wide: bool
) -> None:
    facts = tmp_path / "cpuinfo"
    if vendor:
        facts.write_text(
            f"processor : 0\nvendor_id : {vendor}\nflags\t\t: {flags}\n\nprocessor : 1\nvendor_id : other\n"
        )
    monkeypatch.setattr(cpu, "CPU_FACTS", facts)
    monkeypatch.setattr(products, "prefers_onednn", cpu.prefers_onednn)
    folder = write_model(tmp_path / "model", hidden_size=WIDTH, intermediate_size=WIDTH, head_dim=WIDTH // 4)
    base = load_base(str(folder), device="cpu")
    assert any(isinstance(module, WideLinear) for module in base.model.modules()) == is_wide

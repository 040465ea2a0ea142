from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR, SequentialLR

import spard
from spard import SafetyProjection
from spard.config import Spard, Variant
from spard.errors import NonFiniteLoss
from tests.spard.toy import make_step, point, safe, task, values

X = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
SAFE = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))


class Loop:
    """A regression that a conflicting one must not ruin."""

    def __init__(self, defense: Spard | None) -> None:
        self.model = nn.Linear(4, 1)
        with torch.no_grad():
            self.model.weight.fill_(0.1)
            self.model.bias.zero_()
        plain = AdamW(self.model.parameters(), lr=0.05, weight_decay=0.0)
        self.optimizer: Any = SafetyProjection(plain, self.safe_loss, defense, calibration=1) if defense else plain

    def safe_loss(self) -> Tensor:
        outputs: Tensor = self.model(SAFE)
        return (outputs - 0.1 * SAFE.sum(dim=1, keepdim=True)).square().mean()

    def run(self, steps: int) -> Tensor:
        for _ in range(steps):
            self.optimizer.zero_grad()
            (self.model(X) - 2).square().mean().backward()
            self.optimizer.step()
        return torch.cat([part.detach().flatten().clone() for part in self.model.parameters()])


@pytest.mark.parametrize("variant", ["trust_region", "preconditioned", "gated"])
def test_the_safe_loss_stays_down_where_the_plain_loop_loses_it(variant: Variant) -> None:
    plain, defended = Loop(None), Loop(Spard(variant=variant, eta_safe=3.0))
    plain.run(60)
    defended.run(60)
    assert float(defended.safe_loss().detach()) < 0.5 * float(plain.safe_loss().detach())


@pytest.mark.parametrize("variant", get_args(Variant))
def test_it_is_the_step_of_the_training_loop(variant: Variant) -> None:
    defense = Spard(variant=variant, tau=10.0, check_every=1)
    theta, twin = point(), point()
    inner = AdamW(theta, lr=0.1)
    make_step(defense, {"mean": 10.0})(twin, task(twin, 1.0, -2.0), safe(twin, "mean", 3.0, 4.0), AdamW(twin, lr=0.1))

    optimizer = SafetyProjection(inner, lambda: (3 * theta[0] + 4 * theta[1]).sum(), defense)
    (theta[0] - 2 * theta[1]).sum().backward()
    optimizer.step()

    assert values(theta) == values(twin)
    assert optimizer.metrics["spag/triggered"] == 1.0


def test_a_safe_loop_is_the_plain_loop() -> None:
    assert torch.equal(Loop(Spard(tau=20.0)).run(10), Loop(None).run(10))


def test_any_optimizer_can_be_wrapped() -> None:
    theta = point()
    bound = Spard(variant="trust_region", tau=3.5, eta_safe=9.0, check_every=1)
    optimizer = SafetyProjection(SGD(theta, lr=0.1, momentum=0.9), lambda: theta[0].sum() + 3, bound)
    (-theta[0]).sum().backward()
    optimizer.step()
    assert values(theta) == pytest.approx([0.5, 2.0])


def test_several_losses_may_be_named() -> None:
    theta = point()
    optimizer = SafetyProjection(
        SGD(theta, lr=1.0),
        lambda: {"refusals": theta[0].sum(), "facts": theta[1].sum()},
        Spard(tau=1.5, eta_safe=9.0, check_every=1),
    )
    optimizer.step()
    assert values(theta) == pytest.approx([1.0, 1.5])
    assert optimizer.metrics["loss/safe_facts"] == 2.0


def test_tau_is_the_mean_over_the_calibration_calls() -> None:
    drawn = iter([1.0, 2.0, 6.0])
    theta = point()
    optimizer = SafetyProjection(SGD(theta, lr=1.0), lambda: 0 * theta[0].sum() + next(drawn), calibration=3)
    assert optimizer.tau == {"mean": 3.0}


def test_a_safe_loss_that_is_not_finite_is_refused() -> None:
    theta = point()
    with pytest.raises(NonFiniteLoss, match="safe"):
        SafetyProjection(SGD(theta, lr=1.0), lambda: theta[0].sum() * float("nan"))


@pytest.mark.parametrize("variant", ["trust_region", "gated"])
def test_a_loop_goes_on_bit_for_bit_from_its_state_dicts(variant: Variant) -> None:
    whole, first, second = (Loop(Spard(variant=variant)) for _ in range(3))
    expected = whole.run(20)

    first.run(12)
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())

    assert torch.equal(second.run(8), expected)


def test_learning_rate_schedules_take_it_for_an_optimizer() -> None:
    loop = Loop(Spard())
    schedule = LambdaLR(loop.optimizer, lambda step: 0.5**step)
    loop.run(1)
    schedule.step()
    assert loop.optimizer.optimizer.param_groups[0]["lr"] == 0.025


def test_asking_for_the_configuration_does_not_load_torch() -> None:
    code = "import sys, spard.config; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_package_has_no_other_names() -> None:
    with pytest.raises(AttributeError, match="nothing"):
        _ = spard.nothing


def test_the_manual_s_closure_runs() -> None:
    manual = (Path(__file__).parents[2] / "docs" / "library.md").read_text()
    code = next(block for block in manual.split("```python\n")[1:] if "def safe_loss" in block).split("```")[0]
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


HOOKS = [
    "register_step_pre_hook",
    "register_step_post_hook",
    "register_state_dict_pre_hook",
    "register_state_dict_post_hook",
    "register_load_state_dict_pre_hook",
    "register_load_state_dict_post_hook",
]


@pytest.mark.parametrize("register", HOOKS)
def test_every_hook_of_an_optimizer_is_called_once(register: str) -> None:
    loop, called = Loop(Spard()), []
    getattr(loop.optimizer, register)(lambda optimizer, *_: called.append(optimizer))

    loop.run(1)
    loop.optimizer.load_state_dict(loop.optimizer.state_dict())

    assert called == [loop.optimizer]


def test_hooks_may_change_what_is_saved_and_loaded() -> None:
    loop = Loop(Spard(variant="gated"))
    loop.run(3)
    expected = loop.optimizer.state_dict()["param_groups"]
    loop.optimizer.register_state_dict_post_hook(lambda optimizer, state: {"wrapped": state})
    loop.optimizer.register_load_state_dict_pre_hook(lambda optimizer, state: state["wrapped"])

    saved = loop.optimizer.state_dict()
    loop.optimizer.load_state_dict(saved)

    assert list(saved) == ["wrapped"]
    assert saved["wrapped"]["param_groups"] == expected


def test_a_removed_hook_is_not_called() -> None:
    loop, called = Loop(Spard()), []
    loop.optimizer.register_step_post_hook(lambda *_: called.append(1)).remove()
    loop.run(1)
    assert called == []


def test_wrapping_leaves_the_state_of_the_wrapped_optimizer() -> None:
    theta = point()
    inner = SGD(theta, lr=0.1, momentum=0.9)
    (theta[0] + theta[1]).sum().backward()
    inner.step()
    groups, state = inner.param_groups, inner.state

    optimizer = SafetyProjection(inner, lambda: 0 * theta[0].sum())

    assert optimizer.param_groups is inner.param_groups is groups
    assert optimizer.state is inner.state is state
    assert len(groups) == 1
    assert "momentum_buffer" in state[theta[0]]
    assert optimizer.defaults == inner.defaults


def test_a_group_that_is_added_is_trained_and_projected() -> None:
    theta = point()
    optimizer = SafetyProjection(
        SGD(theta[:1], lr=0.5), lambda: theta[1].sum(), Spard(tau=1.4, check_every=1, eta_safe=9.0)
    )
    optimizer.add_param_group({"params": theta[1:], "lr": 0.1})
    (theta[0] + theta[1]).sum().backward()
    optimizer.step()
    assert values(theta) == pytest.approx([0.5, 1.4])  # 2 - 0.1 is above tau
    optimizer.zero_grad()
    assert [part.grad for part in theta] == [None, None]


def test_a_copy_steps_alone() -> None:
    loop = Loop(Spard())
    loop.run(2)
    other = copy.deepcopy(loop.optimizer)
    assert other.optimizer is not loop.optimizer.optimizer
    assert other.param_groups is other.optimizer.param_groups
    assert other.tau == loop.optimizer.tau


def test_a_gradient_scaler_skips_both_halves_of_a_step_that_overflows() -> None:
    loop = Loop(Spard(check_every=1))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = [part.detach().clone() for part in loop.model.parameters()]
    for factor in (float("inf"), 1.0):
        loop.optimizer.zero_grad()
        scaler.scale((loop.model(X) - 2).square().mean() * factor).backward()
        scaler.step(loop.optimizer)
        scaler.update()
        if factor != 1.0:
            assert all(torch.equal(x, y) for x, y in zip(loop.model.parameters(), before, strict=True))
            assert loop.optimizer.metrics == {}
    assert "loss/safe" in loop.optimizer.metrics


def test_a_chain_of_schedules_runs_without_a_warning() -> None:
    loop = Loop(Spard())
    warmup, decay = LambdaLR(loop.optimizer, lambda step: 1.0), LambdaLR(loop.optimizer, lambda step: 0.5**step)
    schedule = SequentialLR(loop.optimizer, [warmup, decay], milestones=[1])
    for _ in range(3):
        loop.run(1)
        schedule.step()
    assert loop.optimizer.optimizer.param_groups[0]["lr"] == 0.05 * 0.5**2

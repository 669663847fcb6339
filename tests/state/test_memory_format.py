"""The order of a tensor's elements in memory comes back: some kernels pair what lies side by side there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import rekindle
from rekindle.format.receipt import Receipt
from rekindle.restore.saved import Saved
from tests.save.test_capture import assert_same_state

FUSED = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
}


def conv_net(make, memory_format=torch.channels_last):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 2))
    model.to(memory_format=memory_format)
    return {"model": model, "optimizer": make(model.parameters())}


def train(state, seeds) -> None:
    for seed in seeds:
        torch.manual_seed(seed)
        state["optimizer"].zero_grad()
        images = torch.randn(2, 3, 7, 7).to(memory_format=torch.channels_last)
        state["model"](images).square().mean().backward()
        state["optimizer"].step()


def assert_same_training(state, twin) -> None:
    for seeds in ((), (3, 4, 5)):
        train(state, seeds)
        train(twin, seeds)
        assert_same_state(state["model"], twin["model"])
        assert_same_state(state["optimizer"], twin["optimizer"])


def strides(state) -> list[tuple[int, ...]]:
    kept = state["optimizer"].state.values()
    return [value.stride() for entry in kept for value in entry.values()]


@pytest.mark.parametrize("make", FUSED.values(), ids=FUSED)
def test_fused_training_of_a_channels_last_model_goes_on_bit_for_bit(pipeline, make):
    state, twin = conv_net(make), conv_net(make)
    train(state, (0, 1, 2))
    line = pipeline(state)
    line.save()
    line.load_into(twin)
    assert strides(twin) == strides(state)
    assert_same_training(state, twin)


@pytest.mark.parametrize("make", FUSED.values(), ids=FUSED)
@pytest.mark.parametrize("now", [torch.channels_last, torch.contiguous_format])
def test_what_an_optimizer_keeps_follows_a_parameter_whose_order_is_another_now(pipeline, make, now):
    before = torch.contiguous_format if now is torch.channels_last else torch.channels_last
    state, twin, unbroken = conv_net(make, before), conv_net(make, now), conv_net(make, now)
    train(state, (0, 1, 2))
    line = pipeline(state)
    line.save()
    line.load_into(twin)
    unbroken["model"].load_state_dict(state["model"].state_dict())
    for kept, (own, other) in zip(
        state["optimizer"].state.values(),
        zip(twin["model"].parameters(), unbroken["model"].parameters(), strict=True),
        strict=True,
    ):
        unbroken["optimizer"].state[other] = {
            key: torch.empty_like(own, dtype=value.dtype).copy_(value) if value.dim() else value.clone()
            for key, value in kept.items()
        }
    assert_same_training(unbroken, twin)


def test_a_checkpoint_that_says_nothing_of_order_gives_the_order_of_the_parameters(pipeline):
    state, twin = (conv_net(FUSED["AdamW"]) for _ in range(2))
    train(state, (0, 1, 2))
    line = pipeline(state)
    receipt = line.save()
    assert b'"order":[0,2,3,1]' in receipt.raw
    old = receipt.raw.replace(b',"order":[0,2,3,1]', b"")
    stamp, sums = receipt.stamp, receipt.checksums
    static = old[old.index(b'"checksum":') : -1]
    line.receipt = Receipt.decode(Receipt.encode(stamp, static, sums, _values(old)), "memory")
    line.load_into(twin)
    assert_same_training(state, twin)


def _values(receipt: bytes) -> bytes:
    start = receipt.index(b'"values":') + len(b'"values":')
    return receipt[start : receipt.index(b',"checksum":')]


ORDERS = {
    "rows": torch.arange(24.0).view(2, 3, 4),
    "turned": torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1),
    "channels_last": torch.arange(72.0).view(2, 3, 3, 4).to(memory_format=torch.channels_last),
    "one channel": torch.arange(12.0).view(1, 1, 3, 4).to(memory_format=torch.channels_last),
    "channels_last_3d": torch.arange(48.0).view(1, 2, 2, 3, 4).to(memory_format=torch.channels_last_3d),
    "one image": torch.arange(36.0).view(4, 1, 3, 3).to(memory_format=torch.channels_last),
    "empty": torch.empty(0, 3, 2).transpose(0, 1),
    "scalar": torch.tensor(1.0),
}


@pytest.mark.parametrize("tensor", ORDERS.values(), ids=ORDERS)
def test_new_tensors_get_the_strides_of_the_saved_ones(pipeline, tensor):
    line = pipeline({"v": rekindle.Values(x=tensor)})
    line.save()
    back = rekindle.Values()
    line.load_into({"v": back})
    assert torch.equal(back.x, tensor)
    if tensor.numel():
        assert back.x.stride() == tensor.stride()


def test_of_a_tensor_with_gaps_the_order_comes_back_and_of_an_expanded_one_the_values(pipeline):
    gaps = torch.arange(48.0).view(4, 3, 4)[::2].permute(2, 0, 1)
    expanded = torch.arange(3.0).expand(2, 3)
    line = pipeline({"v": rekindle.Values(gaps=gaps, expanded=expanded)})
    line.save()
    back = rekindle.Values()
    line.load_into({"v": back})
    assert torch.equal(back.gaps, gaps) and torch.equal(back.expanded, expanded)
    assert back.gaps.stride() == (1, 12, 4) and back.expanded.is_contiguous()


VIEWS = {
    "conjugated": lambda: torch.randn(3, 2, dtype=torch.complex64).conj(),
    "negated": lambda: torch.randn(3, 2, dtype=torch.complex64).conj().imag,
    "both": lambda: torch._neg_view(torch.randn(3, 2, dtype=torch.complex64).t().conj()),
}


@pytest.mark.parametrize("make", VIEWS.values(), ids=VIEWS)
def test_conjugated_and_negated_views_come_back_as_such(pipeline, make):
    view = make()
    module, twin = nn.Module(), nn.Module()
    module.register_buffer("x", view)
    twin.register_buffer("x", make())
    line = pipeline({"v": rekindle.Values(x=view), "m": module})
    line.save()
    back = rekindle.Values()
    line.load_into({"v": back, "m": twin})
    for found in (back.x, twin.x):
        assert torch.equal(found, view)
        assert (found.is_conj(), found.is_neg()) == (view.is_conj(), view.is_neg())


def test_an_order_that_is_none_is_refused(pipeline):
    receipt = pipeline({"v": rekindle.Values(x=ORDERS["turned"])}).save()
    for order in (b"[0,0,1]", b"[0,1]", b"[1,2,3]", b'"C"'):
        fields = receipt.raw.replace(b'"order":[1,2,0]', b'"order":' + order)
        assert fields != receipt.raw
        static = fields[fields.index(b'"checksum":') : -1]
        with pytest.raises(rekindle.FormatError, match=r"v\.x"):
            Saved(Receipt.decode(Receipt.encode(receipt.stamp, static, receipt.checksums, b"[]"), "memory"))

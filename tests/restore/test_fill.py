"""What is filled in place, what gets tensors of its own, and what becomes of tensors that share memory."""

from __future__ import annotations

import pytest
import torch

import rekindle
from rekindle.format.layout import BLOCK
from tests.save.test_capture import assert_same_state, model_and_optimizer, update


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def holder(**tensors: torch.Tensor) -> torch.nn.Module:
    module = torch.nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
    return module


def test_live_optimizer_state_is_filled_where_it_is(pipeline):
    model, optimizer = model_and_optimizer(0, torch.optim.AdamW)
    twin, its_optimizer = model_and_optimizer(1, torch.optim.AdamW)
    for seed in range(2):
        update(model, optimizer, seed)
        update(twin, its_optimizer, seed + 7)
    line = pipeline({"model": model, "optimizer": optimizer})
    line.save()
    before = [t for p in twin.parameters() for t in its_optimizer.state[p].values() if isinstance(t, torch.Tensor)]
    line.load_into({"model": twin, "optimizer": its_optimizer})
    after = [t for p in twin.parameters() for t in its_optimizer.state[p].values() if isinstance(t, torch.Tensor)]
    assert len(before) == len(after) > 0 and all(a is b for a, b in zip(before, after, strict=True))
    assert_same_state(optimizer, its_optimizer)


def test_tensors_of_several_blocks_and_odd_sizes(pipeline):
    torch.manual_seed(0)
    sizes = [0, 1, 3, 1023, BLOCK // 4 - 1, BLOCK // 4 + 1, 2 * BLOCK // 4 + 7]
    live = holder(**{f"t{n}": torch.randn(n) for n in sizes})
    twin = holder(**{f"t{n}": torch.randn(n) for n in sizes})
    line = pipeline({"m": live, "v": rekindle.Values(x=torch.randn(BLOCK // 4 + 5), empty=torch.empty(0, 3))})
    line.save()
    values = rekindle.Values()
    line.load_into({"m": twin, "v": values})
    for n in sizes:
        assert torch.equal(bits(getattr(live, f"t{n}")), bits(getattr(twin, f"t{n}")))
    assert torch.equal(values.x, line.capture.state["v"].x) and values.empty.shape == (0, 3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(40, 60).t(),
        lambda: torch.randn(8, 9, 10, 11).to(memory_format=torch.channels_last),
        lambda: torch.randn(40, 60)[::2, 5:50],
        lambda: torch.randn(6, 1, 4).expand(6, 1, 4).transpose(0, 2),
        lambda: torch.randn(3000, 3000).t(),
    ],
)
def test_tensors_that_are_not_contiguous(pipeline, make):
    live, twin = holder(x=make()), holder(x=make())
    strides, address = twin.x.stride(), twin.x.data_ptr()
    line = pipeline({"m": live})
    line.save()
    line.load_into({"m": twin})
    assert torch.equal(live.x, twin.x)
    assert (twin.x.stride(), twin.x.data_ptr()) == (strides, address)


def test_what_lies_around_a_live_view_stays_as_it_is(pipeline):
    base = torch.zeros(100)
    live, twin = holder(x=torch.arange(10.0)), holder(x=base[20:30])
    line = pipeline({"m": live})
    line.save()
    line.load_into({"m": twin})
    assert torch.equal(base[20:30], torch.arange(10.0)) and base[:20].sum() == 0 == base[30:].sum()


def test_tied_tensors_into_tied_ones_and_into_separate_ones(pipeline):
    shared = torch.randn(50)
    line = pipeline({"m": holder(a=shared, b=shared)})
    line.save()
    one = torch.zeros(50)
    tied, separate = holder(a=one, b=one), holder(a=torch.zeros(50), b=torch.ones(50))
    for twin in (tied, separate):
        line.load_into({"m": twin})
        assert torch.equal(twin.a, shared) and torch.equal(twin.b, shared)
    assert tied.a.data_ptr() == tied.b.data_ptr() and separate.a.data_ptr() != separate.b.data_ptr()


def test_separate_tensors_into_live_ones_that_share_memory_are_not_mixed(pipeline):
    """Not what anybody wants, but what torch does: the last one wins, whole."""
    size = 1 << 20
    line = pipeline({"m": holder(a=torch.ones(size), b=torch.full((size,), 2.0))})
    line.save()
    one = torch.zeros(size)
    line.load_into({"m": holder(a=one, b=one)})
    assert one.eq(2).all()
    flat = torch.zeros(size + 10)
    line.load_into({"m": holder(a=flat[:size], b=flat[10:])})
    assert flat[:10].eq(1).all() and flat[10:].eq(2).all()


def test_plain_values_that_shared_memory_with_a_parameter_get_memory_of_their_own(pipeline):
    model = torch.nn.Linear(3, 3)
    line = pipeline({"model": model, "v": rekindle.Values(best=model.weight.detach())})
    line.save()
    twin, values = torch.nn.Linear(3, 3), rekindle.Values()
    line.load_into({"model": twin, "v": values})
    assert torch.equal(values.best, model.weight) and torch.equal(twin.weight, model.weight)
    assert values.best.data_ptr() != twin.weight.data_ptr() and not values.best.requires_grad


def test_hooks_see_the_checkpoint_and_may_change_it(pipeline):
    live, twin = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

    def halve(module, state, prefix, *_):
        state[prefix + "weight"] = state[prefix + "weight"] / 2

    twin.register_load_state_dict_pre_hook(halve)
    line = pipeline({"model": live})
    line.save()
    line.load_into({"model": twin})
    assert torch.equal(twin.weight, live.weight / 2) and torch.equal(twin.bias, live.bias)


def test_autograd_notices_that_a_parameter_was_overwritten(pipeline):
    model = torch.nn.Linear(2, 2)
    line = pipeline({"model": model})
    line.save()
    version = model.weight._version
    line.load_into({"model": model})
    assert model.weight._version > version and model.weight.is_leaf and model.weight.requires_grad


@pytest.mark.gpu
def test_tensors_on_a_device_are_filled_where_they_are(pipeline):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.manual_seed(0)

    def make(seed):
        torch.manual_seed(seed)
        return holder(
            big=torch.randn(BLOCK // 4 + 77, device="cuda"),
            turned=torch.randn(500, 300, device="cuda").t(),
            scalar=torch.tensor(float(seed), device="cuda"),
            flags=torch.rand(1000, device="cuda") > 0.5,
            half=torch.randn(12345, device="cuda").bfloat16(),
        )

    live, twin = make(1), make(2)
    addresses = {key: tensor.data_ptr() for key, tensor in twin.state_dict().items()}
    line = pipeline({"m": live})
    line.save()
    line.load_into({"m": twin})
    for key, tensor in twin.state_dict().items():
        assert torch.equal(tensor, live.state_dict()[key]) and tensor.data_ptr() == addresses[key]

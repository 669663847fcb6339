"""What a save finds in a live state, also after the state has changed its shape."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

import rekindle
from rekindle.errors import UnsupportedValueError, UsageError
from rekindle.format.layout import BLOCK
from rekindle.save.capture import Capture

Linear = torch.nn.Linear


def model_and_optimizer(seed: int = 0, kind: type = torch.optim.AdamW, **options):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(Linear(4, 3), torch.nn.ReLU(), Linear(3, 2))
    return model, kind(model.parameters(), lr=0.1, **options)


def update(model, optimizer, seed: int = 5) -> None:
    torch.manual_seed(seed)
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().sum().backward()
    optimizer.step()


def flat(tree, path=""):
    """Every leaf of a nested state by its path."""
    if isinstance(tree, dict):
        return {k: v for key, value in tree.items() for k, v in flat(value, f"{path}.{key}").items()}
    if isinstance(tree, (list, tuple)):
        return {k: v for key, value in enumerate(tree) for k, v in flat(value, f"{path}[{key}]").items()}
    return {path: tree}


def assert_same_state(a, b) -> None:
    left, right = flat(a.state_dict()), flat(b.state_dict())
    assert left.keys() == right.keys()
    for path, value in left.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == right[path].dtype and value.shape == right[path].shape, path
            assert torch.equal(value, right[path]), path
        else:
            assert value == right[path] and type(value) is type(right[path]), path


# -- names -----------------------------------------------------------------------------------------------------------


def test_tensors_are_named_by_their_place_in_the_state(pipeline):
    model, optimizer = model_and_optimizer()
    update(model, optimizer)
    receipt = pipeline({"model": model, "opt": optimizer}).save()
    names = {chunk.name for chunk in receipt.layout.chunks}
    assert {"model.0.weight", "model.2.bias", "opt.state.0.weight.exp_avg"} <= names


def test_names_do_not_depend_on_wrapping(pipeline):
    model, _ = model_and_optimizer()
    names = {chunk.name for chunk in pipeline({"model": model}).save().layout.chunks}
    wrapped = torch.compile(model)
    assert {chunk.name for chunk in pipeline({"model": wrapped}).save().layout.chunks} == names


def test_names_that_would_meet_are_kept_apart(pipeline):
    line = pipeline({"v": rekindle.Values(**{"a.b": torch.ones(1), "a": {"b": torch.zeros(1), 3: 1, "3": 2}})})
    assert len({chunk.name for chunk in line.save().layout.chunks}) == 2
    back = rekindle.Values()
    line.load_into({"v": back})
    content = back.state_dict()
    assert content["a.b"].item() == 1 and content["a"]["b"].item() == 0 and content["a"][3] == 1


# -- the state changes its shape -------------------------------------------------------------------------------------


def test_optimizer_state_that_appears_with_the_first_update_is_saved(pipeline):
    model, optimizer = model_and_optimizer()
    line = pipeline({"model": model, "optimizer": optimizer})
    before = line.save()
    update(model, optimizer)
    after = line.save()
    assert len(after.layout.chunks) == len(before.layout.chunks) + 3 * 4
    other, its_optimizer = model_and_optimizer(seed=1)
    line.load_into({"model": other, "optimizer": its_optimizer})
    assert_same_state(model, other)
    assert_same_state(optimizer, its_optimizer)


def test_an_unchanged_state_keeps_its_layout(pipeline):
    model, optimizer = model_and_optimizer()
    update(model, optimizer)
    line = pipeline({"model": model, "optimizer": optimizer})
    plans = []
    for seed in range(4):
        update(model, optimizer, seed)
        line.save()
        plans.append(line.capture.prepare()[0])
    assert all(plan is plans[0] for plan in plans)


@pytest.mark.parametrize("new_shape", [(3, 4), (5, 4)])
@pytest.mark.parametrize("how", ["data", "parameter", "swap"])
def test_the_bytes_of_a_replaced_parameter_are_the_new_ones(pipeline, how, new_shape):
    model = Linear(4, 3, bias=False)
    line = pipeline({"model": model})
    for _ in range(3):
        line.save()
    new = torch.randn(new_shape)
    expected = new.clone()
    if how == "data":
        model.weight.data = new
    elif how == "parameter":
        model.weight = torch.nn.Parameter(new)
    else:
        with torch.no_grad():
            model.weight.set_(new)
    line.save()
    other = Linear(new_shape[1], new_shape[0], bias=False)
    line.load_into({"model": other})
    assert torch.equal(other.weight, expected)
    model.weight.data.add_(1)  # and so are those of the next save
    line.save()
    line.load_into({"model": other})
    assert torch.equal(other.weight, expected + 1)


def test_a_parameter_that_moves_to_another_dtype_is_saved_in_it(pipeline):
    model = Linear(4, 3)
    line = pipeline({"model": model})
    line.save()
    model.to(torch.bfloat16)
    receipt = line.save()
    assert {chunk.dtype for chunk in receipt.layout.chunks} == {"bfloat16"}
    other = Linear(4, 3, dtype=torch.bfloat16)
    line.load_into({"model": other})
    assert_same_state(model, other)


def test_a_new_parameter_group_is_saved(pipeline):
    model, optimizer = model_and_optimizer()
    update(model, optimizer)
    line = pipeline({"model": model, "optimizer": optimizer})
    line.save()
    extra = torch.nn.Parameter(torch.randn(3))
    optimizer.add_param_group({"params": [extra], "lr": 0.5})
    extra.grad = torch.ones(3)
    optimizer.step()
    line.save()
    other, its_optimizer = model_and_optimizer(seed=1)
    its_optimizer.add_param_group({"params": [torch.nn.Parameter(torch.randn(3))]})
    line.load_into({"model": other, "optimizer": its_optimizer})
    assert_same_state(optimizer, its_optimizer)
    assert its_optimizer.param_groups[1]["lr"] == 0.5


def test_two_parameters_that_swap_places_are_saved_where_they_are(pipeline):
    values = rekindle.Values(a=torch.zeros(3), b=torch.ones(3))
    line = pipeline({"v": values})
    line.save()
    values.a, values.b = values.b, values.a
    line.save()
    back = rekindle.Values()
    line.load_into({"v": back})
    assert back.a.tolist() == [1, 1, 1] and back.b.tolist() == [0, 0, 0]


def test_a_value_that_becomes_a_tensor_and_back(pipeline):
    values = rekindle.Values(a=1, b=[torch.ones(2)])
    line = pipeline({"v": values})
    for a, b in [(1, [torch.ones(2)]), (torch.zeros(3), [2, None]), ({"x": 1}, (torch.ones(1),)), (1, [torch.ones(2)])]:
        values.a, values.b = a, b
        line.save()
        back = rekindle.Values()
        line.load_into({"v": back})
        assert repr(back) == repr(values)


def test_tensors_made_anew_at_each_call_are_saved_as_they_are(pipeline):
    class Fresh:
        at = 0

        def state_dict(self):
            return {"x": torch.full((1000,), self.at), "at": self.at}

        def load_state_dict(self, state):
            self.at, self.x = state["at"], state["x"]

    fresh, back = Fresh(), Fresh()
    line = pipeline({"f": fresh})
    for at in range(1, 6):
        fresh.at = at
        line.save()
        line.load_into({"f": back})
        assert back.at == at and back.x.tolist() == [at] * 1000


def test_a_save_does_not_change_what_it_saves(pipeline):
    model, optimizer = model_and_optimizer()
    update(model, optimizer)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    pointers = [p.data_ptr() for p in model.parameters()]
    line = pipeline({"model": model, "optimizer": optimizer}, rng=True)
    line.save()
    line.save()
    assert flat(before[0]).keys() == flat(model.state_dict()).keys()
    assert all(torch.equal(before[0][k], v) for k, v in model.state_dict().items())
    assert [p.data_ptr() for p in model.parameters()] == pointers
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("first", ["contiguous", "turned"])
def test_a_large_tensor_whose_strides_change_is_saved_on(pipeline, first):
    """Large contiguous tensors are copied in pieces, others whole; the layout is the same for both."""
    width = BLOCK // 4 + 5
    contiguous = torch.arange(2 * width, dtype=torch.float32).view(2, width)
    turned = torch.arange(2 * width, dtype=torch.float32).neg().view(width, 2).t()
    assert not turned.is_contiguous()
    order = [contiguous, turned] if first == "contiguous" else [turned, contiguous]
    values = rekindle.Values(x=order[0], small=torch.arange(3))
    line = pipeline({"v": values})
    for now in (order[0], order[0], order[1], order[1]):  # both slots have views of the first kind
        values.x = now
        line.save()
        back = rekindle.Values()
        line.load_into({"v": back})
        assert torch.equal(back.x, now) and torch.equal(back.small, values.small)


# -- kinds of tensors ------------------------------------------------------------------------------------------------


def there_and_back(pipeline, **values):
    line = pipeline({"v": rekindle.Values(**values)})
    line.save()
    back = rekindle.Values()
    line.load_into({"v": back})
    return back


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(0),
        torch.empty(0, 5),
        torch.empty(3, 0, 2, dtype=torch.int8),
        torch.tensor(3.5),
        torch.tensor(True),
        torch.arange(12.0).view(3, 4).t(),
        torch.arange(20)[::3],
        torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.arange(3.0).view(3, 1).expand(3, 4),
        torch.tensor(7).expand(5),
        torch.arange(24).view(2, 3, 4).permute(2, 0, 1),
        torch.arange(100)[50:60],
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(3, dtype=torch.complex64).conj().imag,
        torch.randn(3, requires_grad=True),
        torch.nn.Parameter(torch.randn(3), requires_grad=False),
        torch.nn.Buffer(torch.randn(3)),
    ],
    ids=lambda t: f"{tuple(t.shape)}-{str(t.dtype)[6:]}-{t.stride()}",
)
def test_a_tensor_of_any_shape_and_strides_comes_back(pipeline, tensor):
    back = there_and_back(pipeline, x=tensor, y={"z": [tensor.clone()]})
    for found in (back.x, back.y["z"][0]):
        assert found.dtype == tensor.dtype and found.shape == tensor.shape
        assert torch.equal(found, tensor)


def test_nan_and_negative_zero_come_back_bit_for_bit(pipeline):
    bits = torch.tensor([0x7FC00001, -1, -0x80000000, 0x7F800000, 1], dtype=torch.int32)
    back = there_and_back(pipeline, x=bits.view(torch.float32))
    assert torch.equal(back.x.view(torch.int32), bits)


def test_a_tensor_of_several_blocks_comes_back(pipeline):
    tensors = {"a": torch.arange(BLOCK // 4 + 3, dtype=torch.int32), "b": torch.arange(2 * BLOCK // 8)}
    back = there_and_back(pipeline, **tensors)
    for name, tensor in tensors.items():
        assert torch.equal(getattr(back, name), tensor)


def test_tied_weights_are_stored_once_and_come_back_tied(pipeline):
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(50, 4)
            self.head = Linear(4, 50, bias=False)
            self.head.weight = self.embedding.weight

    model, other = Tied(), Tied()
    line = pipeline({"model": model})
    receipt = line.save()
    assert [chunk.name for chunk in receipt.layout.chunks] == ["model.embedding.weight"]
    assert receipt.layout.nbytes == 50 * 4 * 4
    line.load_into({"model": other})
    assert_same_state(model, other)
    assert other.head.weight is other.embedding.weight


def test_one_tensor_in_several_places_of_a_state_comes_back_as_one(pipeline):
    tensor, alone = torch.randn(5), torch.randn(5)
    line = pipeline({"a": rekindle.Values(x=tensor, y=[tensor, alone]), "b": rekindle.Values(z=tensor)})
    assert line.save().layout.nbytes == 2 * 5 * 4
    a, b = rekindle.Values(), rekindle.Values()
    line.load_into({"a": a, "b": b})
    assert a.x is a.y[0] is b.z and torch.equal(a.x, tensor)
    a.x.add_(1)
    assert torch.equal(b.z, tensor + 1) and torch.equal(a.y[1], alone)


def test_views_that_only_overlap_are_not_taken_for_tied(pipeline):
    whole = torch.arange(6.0)
    back = there_and_back(
        pipeline, whole=whole, head=whole[:3], turned=whole.view(2, 3).t(), ints=whole.view(torch.int32)
    )
    assert torch.equal(back.whole, whole) and torch.equal(back.head, whole[:3])
    assert torch.equal(back.turned, whole.view(2, 3).t()) and torch.equal(back.ints, whole.view(torch.int32))


def test_a_tensor_and_its_lazy_conjugate_are_not_tied(pipeline):
    """They share address, shape, strides and dtype, and differ in a flag."""
    tensor = torch.randn(3, dtype=torch.complex64)
    back = there_and_back(pipeline, x=tensor, y=tensor.conj())
    assert torch.equal(back.x, tensor) and torch.equal(back.y, tensor.conj())


def test_two_empty_tensors_are_not_tied(pipeline):
    back = there_and_back(pipeline, x=torch.empty(0, 3), y=torch.empty(0, 3))
    assert back.x is not back.y and back.x.shape == back.y.shape == (0, 3)


def unsupported_tensors():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield pytest.param(torch.eye(3).to_sparse(), id="sparse")
        yield pytest.param(torch.eye(3).to_sparse_csr(), id="sparse-csr")
        yield pytest.param(torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), id="quantized")
        yield pytest.param(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), id="nested")
    yield pytest.param(torch.empty(3, device="meta"), id="meta")


@pytest.mark.parametrize("tensor", list(unsupported_tensors()))
def test_a_tensor_that_the_format_can_not_hold_is_refused_by_its_path(pipeline, tensor):
    with pytest.raises(UnsupportedValueError, match=r"^v\.a\.b\[1\]: "):
        pipeline({"v": rekindle.Values(a={"b": [1, tensor]})}).save()


def test_a_module_that_was_never_run_and_has_no_weights_yet_is_refused_by_its_path(pipeline):
    with pytest.raises(UnsupportedValueError, match=r"^model\.0\.weight: "):
        pipeline({"model": torch.nn.Sequential(torch.nn.LazyLinear(3))}).save()


# -- what may be in a state ------------------------------------------------------------------------------------------


def test_what_has_no_state_dict_is_refused_by_name():
    with pytest.raises(UsageError, match=r"state\['epoch'\] is a int.*rekindle\.Values"):
        Capture({"epoch": 3})
    with pytest.raises(UsageError, match="rng"):
        Capture({"rng": rekindle.Values()})
    for name in ("", 3):
        with pytest.raises(UsageError, match="non-empty string"):
            Capture({name: rekindle.Values()})


def test_an_empty_state_can_be_saved(pipeline):
    line = pipeline({})
    assert line.save().layout.nbytes == 0
    line.load_into({})


def test_the_estimate_covers_the_optimizer_state_to_come(pipeline):
    model, optimizer = model_and_optimizer()
    line = pipeline({"model": model, "optimizer": optimizer})
    guess = line.capture.estimate()
    update(model, optimizer)
    assert line.save().file_bytes <= guess + 4096
    assert abs(line.capture.estimate() - line.receipt.file_bytes) == 0


def test_parameters_whose_names_start_with_a_dollar(pipeline):
    live, back = (torch.nn.ParameterDict({"$a": torch.randn(2), "b": torch.randn(2)}) for _ in range(2))
    line = pipeline({"model": live})
    line.save()
    line.load_into({"model": back})
    assert_same_state(live, back)


class Wrapper(torch.optim.Optimizer):
    """An optimizer as Accelerate wraps it: it is never made as one, and shows what the other has as its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)

    def state_dict(self):
        return self.optimizer.state_dict()

    def load_state_dict(self, state):
        self.optimizer.load_state_dict(state)

    def step(self, closure=None):
        self.optimizer.step(closure)


def test_an_optimizer_is_found_in_its_wrappers() -> None:
    model, optimizer = model_and_optimizer()
    assert Capture({"model": model, "opt": Wrapper(Wrapper(optimizer))}).state["opt"] is optimizer


def test_a_wrapper_with_state_of_its_own_is_saved_itself() -> None:
    class Averaging(Wrapper):
        state = {}

    model, optimizer = model_and_optimizer()
    wrapper = Averaging(optimizer)
    assert Capture({"model": model, "opt": wrapper}).state["opt"] is wrapper

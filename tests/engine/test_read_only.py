import copy
import inspect
import pickle
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tensordict import TensorDict

from rolemesh.engine.protocol import DataProto
from rolemesh.engine.read_only import ReadOnlyError, ReadOnlyTensor, read_only


@pytest.fixture
def memory() -> torch.Tensor:
    return torch.arange(1.0, 13.0).view(4, 3)


@pytest.fixture
def column(memory) -> ReadOnlyTensor:
    return ReadOnlyTensor.wrap(memory)


IN_PLACE = sorted(
    name
    for name in dir(torch.Tensor)
    if name.endswith("_")
    and not name.endswith("__")
    and callable(getattr(torch.Tensor, name))
    and name[0] != "_"
)


def succeeds(call) -> bool:
    try:
        call()
    except (TypeError, RuntimeError, IndexError, ValueError, AttributeError):
        return False
    return True


@pytest.mark.filterwarnings("ignore:This overload")
def test_every_in_place_call_that_works_on_a_plain_tensor_is_refused(column, memory):
    row, float_column, numbers = torch.tensor([0]), memory.clone(), memory[:, 0].long()
    argument_lists = [(), (1,), (0, 1), (0, row, 1.0), (memory > 0, 1.0), (memory > 0, float_column)]
    argument_lists += [(float_column,), (float_column, float_column), (0, row, memory[:1].clone())]
    argument_lists += [((row,), torch.tensor(1.0)), (row, torch.tensor([1.0])), (numbers,)]
    refused = set()
    for name in IN_PLACE:
        for arguments in argument_lists:
            if succeeds(lambda: getattr(memory.clone(), name)(*arguments)):  # noqa: B023
                with pytest.raises(ReadOnlyError, match=rf"{name}\(\).*clone\(\)"):
                    getattr(column, name)(*arguments)
                refused.add(name)
    assert len(refused) > 100
    assert memory.tolist() == torch.arange(1.0, 13.0).view(4, 3).tolist()


def augment(column):
    column += 1


def assign(column):
    column[0, 0] = 9


WRITES = [
    augment,
    assign,
    lambda x: x[:, :2].zero_(),
    lambda x: x.view(-1)[2:4].fill_(0),
    lambda x: x.T.zero_(),
    lambda x: x.detach().zero_(),
    lambda x: x.data.zero_(),
    lambda x: setattr(x, "data", torch.zeros(1)),
    lambda x: x.unbind(0)[1].zero_(),
    lambda x: x.split(2)[1].zero_(),
    lambda x: torch.chunk(x, 2)[0].mul_(2),
    lambda x: x.expand(2, 4, 3).zero_(),
    lambda x: x.to(torch.float32).zero_(),
    lambda x: x.contiguous().zero_(),
    lambda x: x.cpu().zero_(),
    lambda x: torch.as_tensor(x).zero_(),
    lambda x: torch.broadcast_tensors(x, x)[0].zero_(),
    lambda x: torch.add(x, 1, out=x),
    lambda x: torch.max(torch.ones(3, 3), 0, out=(x[0], torch.zeros(3, dtype=torch.long))),
    lambda x: F.relu(x, inplace=True),
    lambda x: F.dropout(x, 0.5, training=True, inplace=True),
    lambda x: torch.nn.ReLU(inplace=True)(x),
    lambda x: torch.nn.init.zeros_(x),
    lambda x: torch._foreach_add_([x], 1),
    lambda x: torch.index_put_(x, (torch.tensor([0]),), torch.tensor(1.0)),
    lambda x: TensorDict({"x": x}, batch_size=[4])["x"].zero_(),
    lambda x: TensorDict({"x": x}, batch_size=[4])[1:3]["x"].zero_(),
    lambda x: DataProto.from_dict({"x": x}).chunk(2)[0].batch["x"].zero_(),
    lambda x: DataProto.from_dict({"x": x}).select().batch["x"].zero_(),
]


@pytest.mark.parametrize("write", WRITES, ids=lambda write: inspect.getsource(write).strip()[:60])
def test_writes_are_refused_also_through_views_and_containers(write, column, memory):
    with pytest.raises(ReadOnlyError, match=r"clone\(\)"):
        write(column)
    assert memory.tolist() == torch.arange(1.0, 13.0).view(4, 3).tolist()


def test_arrays_of_the_memory_are_not_writable(column, memory):
    for array in (column.numpy(), np.asarray(column), column[1:].numpy()):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 9
    assert np.shares_memory(column.numpy(), memory.numpy())


PLAIN = [
    lambda x: x.clone(),
    lambda x: x + 1,
    lambda x: 2 * x,
    lambda x: x[[0, 1]],
    lambda x: x[x > 3],
    lambda x: torch.cat([x, x]),
    lambda x: F.pad(x, (0, 1)),
    lambda x: x.to(torch.float64),
    lambda x: x.repeat_interleave(2, dim=0),
    lambda x: x.max(dim=0).values,
    lambda x: x.sort(dim=0)[0],
    lambda x: F.softmax(x, dim=-1),
    lambda x: x.T.contiguous(),
    lambda x: TensorDict({"x": x}, batch_size=[4]).clone()["x"],
    lambda x: DataProto.from_dict({"x": x}).repeat(2).batch["x"],
    lambda x: DataProto.concat([DataProto.from_dict({"x": x})] * 2).batch["x"],
    lambda x: copy.deepcopy(x),
    lambda x: pickle.loads(pickle.dumps(x)),
]


@pytest.mark.parametrize("compute", PLAIN, ids=lambda compute: inspect.getsource(compute).strip()[:60])
def test_results_in_memory_of_their_own_are_plain_tensors_with_the_same_values(compute, column, memory):
    result = compute(column)
    assert type(result) is torch.Tensor
    assert torch.equal(result, compute(memory))
    result.zero_()
    assert memory.sum() == 78


def test_reading_is_as_on_any_tensor(column, memory):
    assert column.shape == memory.shape
    assert type(column.shape) is torch.Size
    assert (column.tolist(), column[0, 1].item(), len(column)) == (memory.tolist(), 2.0, 4)
    assert bool((column == memory).all())
    assert torch.zeros(4, 3).copy_(column).sum() == 78
    assert "ReadOnlyTensor" in repr(column)


def test_gradients_flow_through_a_read_only_input(column, memory):
    weight = torch.ones(3, requires_grad=True)
    (column @ weight).sum().backward()
    assert torch.equal(weight.grad, memory.sum(0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool, torch.float16])
def test_a_column_lies_over_the_arrays_own_memory(dtype):
    source = torch.tensor([0, 1, 3]).to(dtype)
    array = (source.view(torch.int16) if dtype == torch.bfloat16 else source).numpy()
    array.flags.writeable = False
    column = read_only(array, str(dtype).removeprefix("torch."))
    assert (column.dtype, column.data_ptr()) == (dtype, array.ctypes.data)
    assert torch.equal(column.clone(), source)


def test_methods_of_a_batch_leave_received_columns_as_they_are(column, memory):
    data = DataProto.from_dict({"x": column}, {"o": list(range(4))})
    data.union(DataProto.from_dict({"y": torch.ones(4)}))
    data.rename("x", "z")
    data.reorder([3, 2, 1, 0])
    data.pop(["z"])
    data.to("cpu")
    assert memory.tolist() == torch.arange(1.0, 13.0).view(4, 3).tolist()


def test_an_operation_costs_microseconds_more(column, memory):
    def seconds(tensor):
        start = time.perf_counter()
        for _ in range(1000):
            tensor[1:3]
        return time.perf_counter() - start

    extra_us = (min(map(seconds, [column] * 5)) - min(map(seconds, [memory] * 5))) * 1000
    assert extra_us < 200

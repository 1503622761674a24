"""Messages: what goes in comes out, once, in the same shape, and nothing else is sent or kept."""

from __future__ import annotations

import collections
import copyreg
import dataclasses
import gc
import io
import pickle
import threading
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.multiprocessing import reductions

from tests.channel.link import Link, link
from torchcrew.channel.message import INLINE_MAX, PACKET_MAX, Encoder, decode
from torchcrew.memory.arena import Loan

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")

KB, MB = 1 << 10, 1 << 20
LARGE = 100_000  # elements: far above what travels inline

QUANTIZED = {torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4}
DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)} - QUANTIZED, key=str)


@pytest.fixture
def wire() -> Iterator[Link]:
    with link() as made:
        yield made


@pytest.fixture(params=["inline", "block"])
def elements(request: pytest.FixtureRequest) -> int:
    """Elements of a tensor that travels inline, and of one that lies in a block."""
    return 24 if request.param == "inline" else LARGE // 8 * 8


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes that a dense tensor covers, in order of its indices."""
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


def range_of(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.untyped_storage().nbytes()


# Tensors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(wire: Link, dtype: torch.dtype, elements: int) -> None:
    """Every dtype that torch has arrives with its bits unchanged."""
    data = torch.randint(0, 256, (elements * dtype.itemsize,), dtype=torch.uint8)
    if dtype is torch.bool:
        data %= 2
    sent = data.view(dtype)
    got = wire.send([sent, 1])[0]
    assert (got.dtype, got.shape, got.stride()) == (dtype, sent.shape, sent.stride())
    assert raw(got) == raw(sent)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_empty_and_0_d_tensors_of_every_dtype(wire: Link, dtype: torch.dtype) -> None:
    """Zero elements and zero dimensions survive in every dtype."""
    zero_d = torch.zeros(dtype.itemsize, dtype=torch.uint8).view(dtype)[0]
    empty = torch.empty((0, 3), dtype=dtype)
    got_empty, got_0_d = wire.send((empty, zero_d))
    assert (got_empty.shape, got_empty.dtype) == ((0, 3), dtype)
    assert (got_0_d.shape, got_0_d.dtype) == ((), dtype)


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 2, 3), (3, 0, 0), ()])
def test_empty_shapes_keep_shape_and_stride(wire: Link, shape: tuple[int, ...]) -> None:
    """Shape and stride of tensors without data, alone and beside others."""
    sent = torch.ones(shape)
    alone = wire.send(sent)
    beside = wire.send([sent, torch.arange(LARGE), sent.clone()])
    for got in (alone, beside[0], beside[2]):
        assert (got.shape, got.stride()) == (sent.shape, sent.stride())
    assert torch.equal(beside[1], torch.arange(LARGE))


def layouts(elements: int) -> dict[str, torch.Tensor]:
    base = torch.arange(elements, dtype=torch.int64)
    square = base.view(4, -1)
    image = base.to(torch.float32).view(2, 2, 2, -1)
    return {
        "contiguous": square,
        "transposed": square.t(),
        "permuted": image.permute(3, 1, 0, 2),
        "channels last": image.contiguous(memory_format=torch.channels_last),
        "row": square[1],
        "column": square[:, 1],
        "every second": base[::2],
        "middle": base[3:-3],
        "expanded": base[:1].expand(elements),
        "expanded rows": base[:6].expand(1000, 6),
        "expanded with gaps": base[: elements // 2 : 4].expand(3, -1),
        "sliding windows": base.unfold(0, 4, 1),
        "diagonal": square[:, :4].diagonal(),
        "narrow in the last dimension": square[:, 1:3],
        "size 1 with an odd stride": torch.as_strided(base, (1, 3), (7, 1)),
        "stride 0 and 0 elements": base[:1].expand(0, 1),
    }


@pytest.mark.parametrize("name", layouts(24))
def test_layouts(wire: Link, name: str, elements: int) -> None:
    """Any strided view arrives with equal values; dense and overlapping ones with their strides."""
    sent = layouts(elements)[name]
    got = wire.send({"x": sent})["x"]
    assert torch.equal(got, sent)
    assert got.shape == sent.shape
    if name in {"transposed", "permuted", "channels last", "expanded", "expanded rows", "sliding windows"}:
        assert got.stride() == sent.stride()
    else:
        assert got.is_contiguous() or got.stride() == sent.stride()


def test_an_expanded_tensor_is_not_materialised(wire: Link) -> None:
    """A terabyte that is one float expanded is sent as one float."""
    got = wire.send(torch.ones(1).expand(1 << 20, 1 << 20))
    assert got.shape == (1 << 20, 1 << 20)
    assert got.stride() == (0, 0)
    assert got.untyped_storage().nbytes() == 4


def test_a_view_sends_only_what_it_views(wire: Link) -> None:
    """One row of a large matrix is one row in memory, on both sides."""
    matrix = torch.arange(1_000_000).view(1000, 1000)
    row, column = wire.send(matrix[7]), wire.send(matrix[:, 7])
    assert row.untyped_storage().nbytes() == column.untyped_storage().nbytes() == 8000
    assert torch.equal(row, matrix[7])
    assert torch.equal(column, matrix[:, 7])
    assert wire.loans == []


@pytest.mark.parametrize("make", [torch.conj, lambda x: torch._neg_view(x.real.clone()), lambda x: torch.conj(x).imag])
@pytest.mark.parametrize("size", [3, LARGE])
def test_conjugate_and_negative_views(wire: Link, make: Any, size: int) -> None:
    """Lazily conjugated and negated tensors arrive with the values that they show."""
    sent = make(torch.randn(size, dtype=torch.complex64))
    got = wire.send([sent])[0]
    assert torch.equal(got, sent.resolve_conj().resolve_neg())


def test_a_parameter_that_is_a_conjugate_view(wire: Link) -> None:
    """It stays a Parameter."""
    sent = torch.nn.Parameter(torch.randn(3, dtype=torch.complex64).conj())
    got = wire.send(sent)
    assert type(got) is torch.nn.Parameter
    assert got.requires_grad
    assert torch.equal(got.detach(), sent.detach().resolve_conj())


def test_requires_grad_and_parameters(wire: Link, elements: int) -> None:
    """The flag, the class and being a leaf survive, for all four combinations."""
    data = torch.arange(elements, dtype=torch.float32)
    sent = [
        data.clone(),
        data.clone().requires_grad_(),
        torch.nn.Parameter(data.clone()),
        torch.nn.Parameter(data.clone(), requires_grad=False),
    ]
    got = wire.send(sent)
    for a, b in zip(sent, got, strict=True):
        assert (type(a), a.requires_grad) == (type(b), b.requires_grad)
        assert b.is_leaf
        assert b.grad is None
        assert torch.equal(a, b)
    (got[1] * got[2]).sum().backward()
    assert torch.equal(got[1].grad, data)


def test_a_non_leaf_is_refused_as_stock_refuses_it(wire: Link) -> None:
    """Stock's error; what was found before it is not on loan."""
    non_leaf = torch.ones(3, requires_grad=True) * 2
    with pytest.raises(RuntimeError) as stock:
        reductions.reduce_tensor(non_leaf)
    with pytest.raises(RuntimeError) as ours:
        wire.encode([torch.arange(LARGE), non_leaf])
    assert str(ours.value) == str(stock.value)
    assert (wire.on_loan, wire.bytes_used) == (0, 0)


def test_a_hook_warns_as_in_stock(wire: Link) -> None:
    """Backward hooks cannot travel; stock says so."""
    leaf = torch.ones(3, requires_grad=True)
    leaf.register_hook(lambda grad: grad)
    with pytest.warns(UserWarning, match="will not be serialized"):
        assert torch.equal(wire.send(leaf), leaf)


@pytest.mark.parametrize(
    "sparse",
    [
        lambda x: x.to_sparse(),
        lambda x: x.to_sparse_csr(),
        lambda x: x.to_sparse_csc(),
        lambda x: x.to_sparse_bsr((2, 2)),
    ],
    ids=["coo", "csr", "csc", "bsr"],
)
def test_sparse_tensors(wire: Link, sparse: Any) -> None:
    """Sparse layouts arrive in their layout, their parts by block where they are large."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dense = torch.zeros(200, 200)
        dense[::2, ::2] = torch.arange(10_000.0).view(100, 100)
        sent = sparse(dense)
        got = wire.send((sent, sent))
    assert got[0] is got[1]
    assert got[0].layout == sent.layout
    assert torch.equal(got[0].to_dense(), dense)
    assert wire.loans


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("size", [4, LARGE])
def test_quantized_tensors(wire: Link, size: int) -> None:
    """Per tensor and per channel, with scales and zero points."""
    data = torch.randn(2, size)
    for sent in (
        torch.quantize_per_tensor(data, 0.1, 3, torch.quint8),
        torch.quantize_per_channel(data, torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.qint8),
    ):
        got = wire.send([sent])[0]
        assert got.dtype == sent.dtype
        assert torch.equal(got.int_repr(), sent.int_repr())
        assert torch.equal(got.dequantize(), sent.dequantize())


class Marked(torch.Tensor):
    """A subclass with an attribute."""

    mark: str


@pytest.mark.parametrize("size", [4, LARGE])
def test_subclasses_keep_class_and_attributes(wire: Link, size: int) -> None:
    """They travel by their own `__reduce_ex__`, and their data still by block."""
    sent = torch.arange(float(size)).as_subclass(Marked)
    sent.mark = "here"
    got = wire.send([sent, sent])
    assert type(got[0]) is Marked
    assert got[0] is got[1]
    assert got[0].mark == "here"
    assert torch.equal(got[0].as_subclass(torch.Tensor), sent.as_subclass(torch.Tensor))
    assert bool(wire.loans) == (size == LARGE)


def test_buffers_of_modules(wire: Link) -> None:
    """A module is a graph of parameters, buffers and dicts."""
    sent = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.BatchNorm1d(300))
    got = wire.send(sent)
    for (name, a), (other, b) in zip(sent.state_dict().items(), got.state_dict().items(), strict=True):
        assert name == other
        assert torch.equal(a, b)
    assert all(type(p) is torch.nn.Parameter for p in got.parameters())


@pytest.mark.parametrize("size", [8, LARGE])
def test_storages(wire: Link, size: int) -> None:
    """Untyped and typed storages arrive whole; one that a tensor of the message views still is that tensor's."""
    tensor = torch.arange(float(size))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        got, untyped, typed = wire.send([tensor, tensor.untyped_storage(), tensor.storage()])
        assert type(untyped) is torch.UntypedStorage
        assert type(typed) is torch.TypedStorage
        assert typed.dtype is torch.float32
        assert len(typed) == size
    assert untyped.data_ptr() == got.data_ptr()
    assert untyped.nbytes() == tensor.untyped_storage().nbytes()
    untyped.fill_(0)
    assert not got.any()


def test_an_empty_storage(wire: Link) -> None:
    """No bytes, no block."""
    assert wire.send(torch.UntypedStorage(0)).nbytes() == 0


@pytest.mark.leaks_allowed(reason="torch's reduction of shared tensors starts multiprocessing's resource sharer")
@pytest.mark.parametrize("size", [8, LARGE])
def test_a_shared_tensor_stays_shared(wire: Link, size: int) -> None:
    """It travels as a handle: writing on one side is seen on the other, as in stock."""
    sent = torch.zeros(size).share_memory_()
    got = wire.send([sent])[0]
    assert got.is_shared()
    sent[3] = 7
    assert got[3] == 7


# Several tensors ---------------------------------------------------------------------------------------------------


def test_different_tensors_stay_different(wire: Link, elements: int) -> None:
    """Each tensor is itself: none is taken for the one before it."""
    sent = [torch.full((elements,), float(i)) for i in range(5)] + [torch.arange(elements)]
    for a, b in zip(sent, wire.send(sent), strict=True):
        assert torch.equal(a, b)


def test_the_same_object_is_the_same_object(wire: Link, elements: int) -> None:
    """Identity inside a message, through any containers."""
    tensor, array = torch.arange(elements), np.arange(elements)
    parameter = torch.nn.Parameter(torch.ones(elements))
    got = wire.send({"a": [tensor, array, parameter], "b": (tensor, {"c": array, "d": parameter})})
    assert got["a"][0] is got["b"][0]
    assert got["a"][1] is got["b"][1]["c"]
    assert got["a"][2] is got["b"][1]["d"]


def test_views_of_one_memory_stay_views_of_one_memory(wire: Link, elements: int) -> None:
    """Overlapping tensors see each other's writes, and their memory is sent once."""
    base = torch.arange(elements)
    sent = [base, base[4:], base.view(4, -1).t(), base[8:16], base[::2]]
    got = wire.send(sent)
    for a, b in zip(sent, got, strict=True):
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))
    got[0].fill_(-1)
    for view in got:
        assert (torch.as_tensor(view) == -1).all()
    assert sum(nbytes for _, _, nbytes in wire.loans) < 2 * base.nbytes


def test_arrays_are_copies_that_share_nothing(wire: Link, elements: int) -> None:
    """As with stock's pickles: windows of one array, or an array beside a tensor over it, arrive independent."""
    base = np.arange(elements)
    got = wire.send([base[:-4], base[4:], torch.from_numpy(base), base])
    for sent, arrived in zip([base[:-4], base[4:], base, base], got, strict=True):
        assert np.array_equal(np.asarray(arrived), sent)
    got[0][:] = -1
    assert np.array_equal(got[1], base[4:])
    assert torch.equal(got[2], torch.from_numpy(base))
    assert np.array_equal(got[3], base)


def test_foreign_byte_order_arrives_as_ours(wire: Link, elements: int) -> None:
    """What torch can read, as with stock."""
    (got,) = wire.send([np.arange(elements, dtype=">f4")])
    assert got.dtype == np.dtype("=f4")
    assert torch.equal(torch.from_numpy(got), torch.arange(elements, dtype=torch.float32))


def test_views_that_overlap_in_part(wire: Link, elements: int) -> None:
    """Neither contains the other; the common middle stays common."""
    base = torch.arange(elements)
    left, right = wire.send([base[:-4], base[4:]])
    assert torch.equal(left, base[:-4])
    assert torch.equal(right, base[4:])
    left[4] = -5
    assert right[0] == -5


def test_neighbours_do_not_alias(wire: Link, elements: int) -> None:
    """Rows that touch in the sender's memory are independent, with storages of their own."""
    base = torch.arange(elements).view(4, -1)
    rows = wire.send(list(base))
    rows[0].fill_(-1)
    assert torch.equal(rows[1], base[1])
    assert all(row.untyped_storage().nbytes() == row.nbytes for row in rows)


def test_interleaved_columns(wire: Link) -> None:
    """Views with gaps that lie in each other's gaps arrive right."""
    base = torch.arange(40_000).view(200, 200)
    for a, b in zip(base.t(), wire.send(list(base.t())), strict=True):
        assert torch.equal(a, b)


def test_views_of_other_dtypes_alias(wire: Link, elements: int) -> None:
    """A bit view and its tensor are one memory."""
    base = torch.ones(elements)
    floats, ints = wire.send([base, base.view(torch.int32)])
    ints.zero_()
    assert not floats.any()


@pytest.mark.parametrize("count", [50, 2_000, 10_000])
def test_many_small_tensors(wire: Link, count: int) -> None:
    """One message, and a block for the data and one for the header, however many tensors."""
    sent = [torch.full((i % 7,), i) for i in range(count)]
    got = wire.send(sent)
    assert len(wire.loans) <= 2
    assert all(torch.equal(a, b) for a, b in zip(sent, got, strict=True))


@pytest.mark.parametrize("count", [10, 100, 500, 900])
def test_tensors_of_many_dimensions_fit_in_a_packet(wire: Link, count: int) -> None:
    """Their shapes and strides are most of the header, which must go into a block in time."""
    sent = [torch.zeros(1).expand(2, 300, 70_000, *[1] * 30, *[2] * 20) for _ in range(count)]
    message = wire.encode(sent)
    assert len(message.header) + len(message.body) <= PACKET_MAX + 1024
    got = wire.decode(message)
    assert all(a.shape == b.shape and a.stride() == b.stride() for a, b in zip(sent, got, strict=True))


def test_packets_stay_small_whatever_is_sent(wire: Link) -> None:
    """Header and inline data never exceed what the receiver reserves."""
    rng = np.random.default_rng(0)
    for _ in range(60):
        sent = [
            torch.zeros([int(n) for n in rng.integers(1, 4, rng.integers(0, 7))]) for _ in range(rng.integers(1, 600))
        ]
        sent.append("x" * int(rng.integers(0, PACKET_MAX)))
        message = wire.encode(sent)
        assert len(message.header) + len(message.body) <= PACKET_MAX + 1024
        assert len(wire.decode(message)) == len(sent)


def test_tensors_in_a_block_are_aligned_as_torch_aligns(wire: Link) -> None:
    """64 bytes, for vector loads, whatever lies before."""
    got = wire.send([torch.ones(n, dtype=torch.uint8) for n in range(1, 400)] + [torch.ones(LARGE)])
    assert wire.loans
    assert {tensor.data_ptr() % 64 for tensor in got} == {0}


@pytest.mark.parametrize("size", [8, LARGE])
def test_saving_one_of_ten_writes_one(wire: Link, size: int) -> None:
    """A storage each: `torch.save` of one tensor does not write the batch."""
    got = wire.send([torch.arange(size) + i for i in range(10)])
    file = io.BytesIO()
    torch.save(got[3], file)
    assert len(file.getvalue()) < 8 * size + 4 * KB
    assert torch.equal(torch.load(io.BytesIO(file.getvalue())), torch.arange(size) + 3)


# What arrives ------------------------------------------------------------------------------------------------------


def test_delivered_tensors_are_writable_and_their_own(wire: Link, elements: int) -> None:
    """In-place writes work and touch neither neighbours nor the sender's tensor."""
    sent = [torch.arange(elements), torch.arange(elements)]
    got = wire.send(sent)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got[0].mul_(-1)
        got[0].numpy()[1] = 99
    assert torch.equal(got[1], sent[1])
    assert torch.equal(sent[0], sent[1])
    assert got[0][1] == 99


def test_delivered_tensors_are_no_views(wire: Link, elements: int) -> None:
    """Autograd and users see a tensor of its own: no base, version 0, usable as a leaf."""
    for got in wire.send([torch.ones(elements), torch.ones(4, elements), torch.ones(elements, 4).t()]):
        assert got._base is None
        assert not got._is_view()
        got.requires_grad_()
        with torch.no_grad():
            got.add_(1)
        assert got.is_leaf


def test_resizing_what_was_delivered(wire: Link, elements: int) -> None:
    """Shrinking works; growing is refused, as for stock's shared tensors; neither touches the neighbour."""
    left, right = wire.send([torch.arange(elements), torch.arange(elements)])
    with pytest.raises(RuntimeError, match="resiz"):
        left.resize_(elements * 3)
    left.resize_(2)
    assert torch.equal(right, torch.arange(elements))
    grown = torch.empty(0).set_(right.untyped_storage(), 0, (elements * 2,))
    assert torch.equal(grown.view(torch.int64), right)


@pytest.mark.leaks_allowed(reason="torch's switch sets an environment variable")
def test_deterministic_algorithms_leave_data_alone(wire: Link, elements: int) -> None:
    """With them torch fills fresh memory, which ours is not."""
    sent = torch.arange(elements).view(4, -1)
    torch.use_deterministic_algorithms(True)
    try:
        got = wire.send(sent)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(got, sent)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_under_other_autograd_modes(wire: Link, context: Any, elements: int) -> None:
    """Encoding and decoding work where gradients are off."""
    with context():
        sent = [torch.arange(float(elements)), torch.ones(3, elements).t(), torch.zeros(0)]
        got = wire.send(sent)
    assert all(torch.equal(a, b) for a, b in zip(sent, got, strict=True))


def test_under_another_default_device(wire: Link) -> None:
    """A default device that the user set does not reach what the protocol makes."""
    sent = [torch.zeros(0, 3), torch.arange(LARGE), torch.arange(4).untyped_storage()]
    with torch.device("meta"):
        got = wire.send(sent)
    assert [x.device.type for x in got] == ["cpu"] * 3
    assert torch.equal(got[1], sent[1])


def test_a_message_is_a_snapshot(wire: Link, elements: int) -> None:
    """Writing to what was sent, after it was encoded, does not reach the receiver."""
    sent = torch.arange(elements)
    message = wire.encode([sent, sent.numpy()])
    sent.zero_()
    for got in wire.decode(message):
        assert torch.equal(torch.as_tensor(got), torch.arange(elements))


def test_a_block_lives_as_long_as_any_view(wire: Link) -> None:
    """Views of views, arrays, memoryviews, DLPack, storages and graphs each keep the block."""
    keepers = [
        lambda x: x[3:].view(-1)[::2],
        lambda x: x.numpy()[5:],
        lambda x: memoryview(x.numpy())[7:],
        lambda x: torch.from_dlpack(x),
        lambda x: np.from_dlpack(x),
        lambda x: x.untyped_storage(),
        lambda x: (x * torch.ones(1, requires_grad=True)).grad_fn,
        lambda x: iter(x),
        lambda x: torch.nn.Parameter(x),
        lambda x: x.detach(),
        lambda x: x.data,
    ]
    for keep in keepers:
        held = keep(wire.send(torch.arange(float(LARGE))))
        assert wire.leases == 1
        del held
        assert wire.leases == 0
    assert wire.bytes_used == 0


# Arrays ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["?", "i1", "u2", "f2", "f8", "c16", "S5", "U3", "M8[ns]", "m8[s]", "V7", "i4,f8"])
@pytest.mark.parametrize("count", [6, LARGE])
def test_array_dtypes(wire: Link, dtype: str, count: int) -> None:
    """Arrays of every kind of dtype, those that refuse to export a buffer included."""
    sent = np.frombuffer(np.random.default_rng(0).bytes(count * np.dtype(dtype).itemsize), "u1").copy()
    if dtype == "?":
        sent %= 2
    if dtype == "U3":
        sent = np.array(["abc", "é", ""] * (count // 3)).view("u1")
    array = sent.view(dtype)
    got = wire.send({"a": array})["a"]
    assert (got.dtype, got.shape) == (array.dtype, array.shape)
    assert got.tobytes() == array.tobytes()


@pytest.mark.parametrize("count", [24, LARGE // 8 * 8])
def test_array_layouts(wire: Link, count: int) -> None:
    """Contiguous, Fortran, sliced, reversed, 0-d, empty, broadcast, object arrays and subclasses."""
    base = np.arange(count)
    cube = base.reshape(2, 4, -1)
    masked = np.ma.masked_array(base, base % 2)
    sent = {
        "cube": cube,
        "fortran": np.asfortranarray(cube),
        "transposed": cube.T,
        "sliced": base[::3],
        "reversed": base[::-1],
        "0-d": np.array(5),
        "scalar": np.float32(2),
        "empty": np.zeros((0, 3)),
        "broadcast": np.broadcast_to(np.arange(3), (4, 3)),
        "objects": np.array([{"a": 1}, None, "x"], dtype=object),
        "recarray": np.rec.fromarrays([base, base * 2.0], names="a,b"),
    }
    got = wire.send([sent, masked])
    for name, array in sent.items():
        other = got[0][name]
        assert type(other) is type(array)
        assert (other.dtype, other.shape) == (array.dtype, array.shape), name
        assert np.array_equal(other, array), name
        assert (
            getattr(other, "flags", None) is None
            or other.flags.f_contiguous == array.flags.f_contiguous
            or (not array.flags.contiguous and not array.flags.f_contiguous)
        )
    assert isinstance(got[1], np.ma.MaskedArray)
    assert (got[1] == masked).all()
    assert (got[1].mask == masked.mask).all()


@pytest.mark.parametrize("count", [8, LARGE])
def test_arrays_are_writable(wire: Link, count: int) -> None:
    """What arrives can be written, also where the original could not, as with stock's pickles."""
    writable, readonly = np.arange(count), np.arange(count)
    readonly.flags.writeable = False
    got = wire.send([writable, readonly])
    got[0][0] = 5
    assert np.array_equal(got[1], readonly)
    got[1][0] = 5
    assert readonly[0] == 0


def test_a_received_array_can_be_sent_on(wire: Link) -> None:
    """An array and a tensor over a block are ordinary sources of another message."""
    first = wire.send([np.arange(LARGE), torch.arange(LARGE)])
    second = wire.send(first)
    del first
    assert np.array_equal(second[0], np.arange(LARGE))
    assert torch.equal(second[1], torch.arange(LARGE))


# Other objects -----------------------------------------------------------------------------------------------------


class Point(NamedTuple):
    """A named tuple."""

    x: Any
    y: Any


@dataclasses.dataclass
class Sample:
    """A dataclass with a tensor."""

    image: torch.Tensor
    label: int
    more: dict[str, Any] = dataclasses.field(default_factory=dict)


class Reduced:
    """An object that says itself how it is pickled."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __reduce__(self) -> Any:
        return Reduced, (self.data,)


class Stateful:
    """An object that reduces with state, in protocol 5 style."""

    def __getstate__(self) -> Any:
        return {"buffer": pickle.PickleBuffer(self.payload), "text": "state"}

    def __init__(self, payload: bytearray) -> None:
        self.payload = payload


class Unpicklable:
    """Raises while it is pickled."""

    def __reduce__(self) -> Any:
        raise ValueError("not me")


class Explosive:
    """Raises while it is unpickled."""

    def __reduce__(self) -> Any:
        return explode, ()


def explode() -> None:
    raise ValueError("boom")


@pytest.mark.parametrize("size", [5, LARGE])
def test_nested_containers(wire: Link, size: int) -> None:
    """Dicts, tuples, dataclasses, named tuples, sets, deques, slots and cycles around tensors and arrays."""
    tensor, array = torch.arange(size), np.arange(size)
    loop: list[Any] = [tensor]
    loop.append(loop)
    sent = {
        "point": Point(tensor, [array]),
        "sample": Sample(tensor * 2, 3, {"a": {1: (array * 2,)}}),
        "deque": collections.deque([tensor], maxlen=3),
        "ordered": collections.OrderedDict(a=tensor),
        "default": collections.defaultdict(list, a=[tensor]),
        "loop": loop,
        "reduced": Reduced(tensor * 3),
        "set": {1, "a", None},
        "slice": slice(1, 2),
        "size": torch.Size([1, 2]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "function": np.mean,
        "class": Point,
        "exception": ValueError("text", tensor),
    }
    got = wire.send(sent)
    assert type(got["point"]) is Point
    assert type(got["sample"]) is Sample
    assert torch.equal(got["point"].x, tensor)
    assert torch.equal(got["sample"].image, tensor * 2)
    assert np.array_equal(got["sample"].more["a"][1][0], array * 2)
    assert got["deque"].maxlen == 3
    assert got["deque"][0] is got["ordered"]["a"] is got["default"]["a"][0] is got["loop"][0] is got["point"].x
    assert got["loop"][1] is got["loop"]
    assert torch.equal(got["reduced"].data, tensor * 3)
    assert (got["set"], got["slice"], got["size"]) == ({1, "a", None}, slice(1, 2), torch.Size([1, 2]))
    assert got["dtype"] is torch.bfloat16
    assert got["function"] is np.mean
    assert got["class"] is Point
    assert torch.equal(got["exception"].args[1], tensor)


@pytest.mark.parametrize("size", [0, 1, 100, 20 * KB, 60 * KB, 3 * MB])
@pytest.mark.parametrize("kind", [bytes, bytearray, "text"])
def test_bytes_and_text(wire: Link, size: int, kind: Any) -> None:
    """Bytes, bytearrays and text of any length keep type and value, with and without tensors beside them."""
    sent = "é" * size if kind == "text" else kind(b"ab" * size)
    assert wire.send(sent) == sent
    got = wire.send([sent, torch.arange(3), sent, torch.arange(LARGE)])
    assert type(got[0]) is type(sent)
    assert got[0] == sent
    assert got[2] is got[0]
    assert torch.equal(got[1], torch.arange(3))
    del got
    assert wire.bytes_used == 0


@pytest.mark.parametrize("size", [0, 10, 60 * KB])
def test_pickle_buffers(wire: Link, size: int) -> None:
    """Out-of-band buffers of other libraries arrive as writable (or read-only) buffers of equal bytes."""
    sent = Stateful(bytearray(b"x" * size))
    got = wire.send([sent, torch.arange(LARGE), pickle.PickleBuffer(b"y" * size)])
    assert bytes(got[0].buffer) == sent.payload
    assert memoryview(got[2]).readonly
    assert bytes(got[2]) == b"y" * size
    if size:
        memoryview(got[0].buffer)[0] = 7


def test_objects_without_data_have_no_header(wire: Link) -> None:
    """Integers and texts cost one pickle and nothing else."""
    message = wire.encode((3, "text", None))
    assert message.header == b""
    assert pickle.loads(message.body) == (3, "text", None)


@pytest.mark.parametrize("size", [PACKET_MAX - 100, PACKET_MAX, PACKET_MAX + 1, 5 * MB])
def test_large_pickles_go_into_a_block_and_leave_it_at_once(wire: Link, size: int) -> None:
    """A far header holds no block once its object is made."""
    sent = {"text": "x" * size, "n": 5}
    message = wire.encode(sent)
    assert len(message.header) + len(message.body) <= PACKET_MAX + 1024
    assert wire.decode(message) == sent
    assert (wire.leases, wire.bytes_used) == (0, 0)


def test_a_large_pickle_beside_inline_data(wire: Link) -> None:
    """The header goes far, the small tensors stay inline."""
    sent = ["x" * MB, torch.arange(5)]
    got = wire.send(sent)
    assert got[0] == sent[0]
    assert torch.equal(got[1], sent[1])
    assert wire.leases == 0


@pytest.mark.parametrize("total", [INLINE_MAX - 1, INLINE_MAX, INLINE_MAX + 1])
def test_the_border_between_inline_and_block(wire: Link, total: int) -> None:
    """At the limit and one byte to each side of it."""
    sent = torch.randint(0, 256, (total,), dtype=torch.uint8)
    assert torch.equal(wire.send(sent), sent)
    assert bool(wire.loans) == (total > INLINE_MAX)


def test_without_a_writer_everything_travels_inline() -> None:
    """Index messages: any size, no arena."""
    sent = {"a": torch.arange(LARGE), "b": np.arange(LARGE), "c": "x" * MB, "d": torch.arange(LARGE)[::2]}
    message = Encoder().encode(sent)
    got = decode(message.header, bytearray(message.body))
    assert torch.equal(got["a"], sent["a"])
    assert np.array_equal(got["b"], sent["b"])
    assert got["c"] == sent["c"]
    assert torch.equal(got["d"], sent["d"])
    got["a"][0] = 5
    assert got["d"][0] == 0


# Failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [Unpicklable(), lambda: None, (i for i in "x"), threading.Lock()],
    ids=["reduce raises", "lambda", "generator", "lock"],
)
def test_what_cannot_be_pickled_leaves_nothing(wire: Link, bad: Any) -> None:
    """The error is pickle's, no block is on loan, and the next message is as good as any."""
    tensors = [torch.arange(LARGE), np.arange(LARGE), torch.arange(3)]
    for _ in range(3):
        with pytest.raises((TypeError, ValueError, AttributeError, pickle.PicklingError)):
            wire.encode([*tensors, "x" * MB, bad])
        assert wire.on_loan == 0
        got = wire.send(tensors)
        assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(tensors, got, strict=True))
        del got
    assert wire.bytes_used == 0


def test_recursion_deeper_than_the_stack_leaves_nothing(wire: Link) -> None:
    """A structure too deep for pickle is an error like any other."""
    deep: list[Any] = [torch.arange(LARGE)]
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(RecursionError):
        wire.encode(deep)
    assert (wire.on_loan, wire.bytes_used) == (0, 0)
    assert wire.send([1]) == [1]
    while deep and isinstance(deep[0], list):  # or its deallocation is deep, too
        deep = deep[0]


def test_what_cannot_be_unpickled_is_returned(wire: Link) -> None:
    """The receiver gets the error; the blocks of the message are free again."""
    message = wire.encode([torch.arange(LARGE), Explosive()])
    assert wire.on_loan == 1
    with pytest.raises(ValueError, match="boom"):
        wire.decode(message)
    assert (wire.on_loan, wire.leases, wire.bytes_used) == (0, 0, 0)


def test_no_room_leaves_nothing() -> None:
    """When the budget is used up, the error passes through, and everything reserved so far is free."""
    with link(lambda nbytes: nbytes < MB) as wire:
        with pytest.raises(MemoryError):
            wire.encode([torch.arange(LARGE), torch.zeros(MB)])
        assert (wire.on_loan, wire.bytes_used) == (0, 0)
        assert torch.equal(wire.send(torch.arange(LARGE)), torch.arange(LARGE))


def test_registrations_made_later_count(wire: Link) -> None:
    """A reduction that a library registers after the encoder was made is used."""
    copyreg.pickle(Late, lambda late: (Late, (late.data + 1,)))
    try:
        got = wire.send(Late(torch.zeros(3)))
    finally:
        del copyreg.dispatch_table[Late]
    assert torch.equal(got.data, torch.ones(3))


class Late:
    """A class whose reduction is registered late."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data


def test_encoders_keep_nothing_of_a_message(wire: Link) -> None:
    """Neither the object nor its tensors live on in the encoder."""
    before = len(gc.get_objects())
    alive: list[bool] = []

    class Watched(list[Any]):
        def __del__(self) -> None:
            alive.append(True)

        def __reduce__(self) -> Any:
            return list, (list(self),)

    sent = Watched([torch.arange(LARGE), torch.arange(3)])
    got = wire.send(sent)
    del sent
    assert alive == [True]
    del got, before
    assert wire.bytes_used == 0


def test_a_loan_names_whole_pages(wire: Link) -> None:
    """Blocks are rounded to pages and lie behind the lease table."""
    wire.send(torch.arange(LARGE))
    loan: Loan = wire.loans[0]
    assert loan[1] % 4096 == loan[2] % 4096 == 0
    assert 8 * LARGE <= loan[2] <= 8 * LARGE * 9 // 8 + 4096

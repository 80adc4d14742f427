"""Logits in tiles: a part of the vocabulary for a part of the rows, so that the [N, V] matrix never exists.

The vocabulary is walked in the outer loop and the rows in the inner one, so that each slice of the weight gradient is
summed in float32 and written once: nothing of size [V, H] exists but the gradient itself. Products are rounded to the
type of their inputs, as in any linear layer; everything after them is float32 (float64 stays float64).

The backward pass needs memory for the weight gradient, [V, H], in any case. If a weight of `KEEP_FROM` entries or more
learns, this memory is allocated in the forward pass and lent until the backward pass: its slice for c entries of V
holds c H numbers, the products of H rows with these entries (of H / 2 rows for two heads, policy and reference), as the
head rounded them. The backward pass reads the products of a slice and writes the gradient over them. Rows beyond the
first H are computed again, and so are all rows of a second call of a weight before its backward pass, and of a second
walk through a retained graph.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn.functional import linear

from klamp.core.arguments import FLOATS, POSITIVE, check_number, check_tensors, check_values_exist
from klamp.core.gradients import applied
from klamp.core.masking import upcast
from klamp.core.types import Direction
from klamp.errors import ConfigError, ShapeError

TILE_BYTES = 4 * 2**20
"""Size of one float32 tile of logits on a CPU; an accelerator, which wants larger products, gets 64 times that."""
TILE_ROWS = 1024
"""Most tokens in one tile."""

Tiles = list[slice]
# (rows of a tile, its vocabulary entries) -> gradient with respect to the head's product there
TileGradient = Callable[[slice, slice], Tensor]
# (which rows learn, their products) -> their TileGradient
MakeGradient = Callable[[Tensor | slice, "Products"], TileGradient]
# Of a weight and of its detached copies: the device and address of their memory
Owner = tuple[torch.device, int]


LOG2_E = math.log2(math.e)


def exp_(x: Tensor) -> Tensor:
    """exp(x), written over x; in float32 on a CPU as 2 ** (x log2(e)), which torch vectorises on every processor."""
    if x.dtype == torch.float32 and x.device.type == "cpu":
        return x.mul_(LOG2_E).exp2_()
    return x.exp_()


def log_sum(total: Tensor, top: Tensor) -> Tensor:
    """log(total) + top, in float64: rounded to float32 it would be an error of every probability of its row."""
    wide = torch.float32 if total.device.type == "mps" else torch.float64
    return total.log().to(wide) + top.to(wide)


class Normaliser(NamedTuple):
    """log sum exp of the logits of each row: as float32 rounds it, and the rest. z - near has no rounding of its own,
    so that log p stays exact where p is nearly 1."""

    near: Tensor
    rest: Tensor

    @classmethod
    def of(cls, wide: Tensor, dtype: torch.dtype) -> Normaliser:
        """In the type of the logits."""
        near = wide.to(dtype)
        return cls(near, (wide - near).to(dtype))


class Head(NamedTuple):
    """The last layer of a model: logits = softcap * tanh((h W^T + b) / softcap) / temperature."""

    weight: Tensor
    bias: Tensor | None = None
    temperature: float = 1.0
    softcap: float | None = None

    def product(self, hidden: Tensor, entries: slice, out: Tensor) -> Tensor:
        """The product h W^T + b for some vocabulary entries, rounded as in any linear layer, written into `out`."""
        weight, bias = self.weight[entries], None if self.bias is None else self.bias[entries]
        if out.dtype != hidden.dtype:
            return out.copy_(linear(hidden, weight, bias))
        return torch.mm(hidden, weight.t(), out=out) if bias is None else torch.addmm(bias, hidden, weight.t(), out=out)

    def logits(self, product: Tensor) -> Tensor:
        """Logits from products, whose memory they take."""
        if self.softcap is not None:
            return product.div_(self.softcap).tanh_().mul_(self.softcap / self.temperature)
        return product if self.temperature == 1.0 else product.div_(self.temperature)

    def slope(self, logits: Tensor) -> Tensor | None:
        """d logits / d product at each of these logits, or one for each row; None where it is 1 everywhere."""
        if self.softcap is not None:
            squares = (logits * (self.temperature / self.softcap)).square_()
            return squares.neg_().add_(1).div_(self.temperature)
        return None if self.temperature == 1.0 else torch.full_like(logits[:, :1], 1 / self.temperature)


class Walk(NamedTuple):
    """What the autograd functions of the heads take beside tensors."""

    scale: tuple[float, float | None]  # temperature and soft cap
    owner: Owner  # of the policy's weight, see `lend`
    learns: bool
    entropy: bool = False
    top_k: int = 0  # how many of the likeliest tokens come before those that are asked for
    direction: Direction = "reverse"


class Tile:
    """One piece of memory for all tiles in turn; asking the system anew for each would cost time."""

    def __init__(self, like: Tensor) -> None:
        self.memory = upcast(like.new_empty(0))

    def shaped(self, rows: int, entries: int) -> Tensor:
        """A tensor [rows, entries] in this memory, float32 (or float64 for such inputs); its old contents are lost."""
        size = rows * entries
        if self.memory.numel() < size:
            self.memory = self.memory.new_empty(size)
        return self.memory[:size].view(rows, entries)


def _split(total: int, most: int) -> Tiles:
    count = math.ceil(total / most)
    return [slice(total * i // count, total * (i + 1) // count) for i in range(count)]


def tiles(hidden: Tensor, weight: Tensor) -> tuple[Tiles, Tiles]:
    """The slices of the vocabulary and of the rows that tiles are made of; a tile is one of each."""
    rows = max(1, min(TILE_ROWS, hidden.shape[0]))
    size = TILE_BYTES if hidden.device.type == "cpu" else 64 * TILE_BYTES
    return _split(weight.shape[0], max(1, size // (4 * rows))), _split(hidden.shape[0], rows)


KEEP_FROM = 2**20
"""Fewest entries of a weight for which this pays; below, every walk through a graph is equal to the last bit."""


class Buffer:
    """Room for the products of the first rows of a call, in the shape of its weight gradient."""

    def __init__(self, hidden: Tensor, weight: Tensor, heads: int) -> None:
        self.d_weight = torch.empty_like(weight, memory_format=torch.contiguous_format)
        self.columns = tiles(hidden, weight)[0]  # of the forward pass, however few rows learn
        self.rows = min(hidden.shape[0], weight.shape[1] // heads)

    def room(self, entries: slice, head: int) -> Tensor:
        """The memory for the products of one head with these vocabulary entries, [rows, entries]."""
        size = self.rows * (entries.stop - entries.start)
        return self.d_weight[entries].view(-1)[head * size : (head + 1) * size].view(self.rows, -1)


# Each call between its forward and its backward pass, by its weight. Nothing here keeps it alive but its graph.
_waiting: WeakValueDictionary[Owner, Buffer] = WeakValueDictionary()


def lend(owner: Owner, hidden: Tensor, weight: Tensor, *, heads: int = 1) -> Buffer | None:
    """Memory to keep products in; None where that is slower, or where another call of this weight waits with some."""
    if hidden.shape[0] == 0 or weight.numel() < KEEP_FROM or weight.shape[1] < heads or owner in _waiting:
        return None
    _waiting[owner] = buffer = Buffer(hidden, weight, heads)
    return buffer


class Products:
    """The products of one head with the hidden states of a call, one tile after another in the same piece of memory."""

    def __init__(self, head: Head, hidden: Tensor, buffer: Buffer | None, *, which: int = 0) -> None:
        self.head, self.hidden, self.buffer, self.which = head, hidden, buffer, which
        self.order: Tensor | None = None
        self.stored = 0 if buffer is None else buffer.rows
        self.tile = Tile(hidden)

    def of(self, index: Tensor | slice) -> Products:
        """The products of some of the rows: the backward pass needs only the rows whose gradient is not 0."""
        some = Products(self.head, self.hidden[index], self.buffer, which=self.which)
        if isinstance(index, Tensor):
            some.order = index[index < self.stored]
            some.stored = some.order.numel()
        return some

    def form(self, rows: slice, entries: slice) -> Tensor:
        """Computes the products of a tile, and keeps them where there is room; valid until the next tile."""
        product = self._empty(rows, entries)
        self.head.product(self.hidden[rows], entries, product)
        if self.buffer is not None and rows.start < self.stored:
            room = self.buffer.room(entries, self.which)[rows]
            room.copy_(product[: room.shape[0]])
        return product

    def recall(self, rows: slice, entries: slice) -> Tensor:
        """The same products as `form` gave: read where they were kept, otherwise computed again."""
        product, end = self._empty(rows, entries), max(rows.start, min(rows.stop, self.stored))
        if self.buffer is not None and end > rows.start:
            room, first = self.buffer.room(entries, self.which), slice(rows.start, end)
            product[: end - rows.start] = room[first if self.order is None else self.order[first]]
        if end < rows.stop:
            self.head.product(self.hidden[end : rows.stop], entries, product[end - rows.start :])
        return product

    def _empty(self, rows: slice, entries: slice) -> Tensor:
        return self.tile.shaped(rows.stop - rows.start, entries.stop - entries.start)


def head_gradients(
    products: Products, grad: Tensor, needs: tuple[bool, ...], make: MakeGradient
) -> list[Tensor | None]:
    """Gradients of hidden, weight and bias, as far as `needs`, only for the rows whose incoming `grad` is not 0."""
    live = grad != 0
    index: Tensor | slice = slice(None) if bool(live.all()) else live.nonzero()[:, 0]
    some = products.of(index)
    with torch.autocast(grad.device.type, enabled=False):
        grads = gradients(some, needs, make(index, some))
    inputs = (products.hidden, products.head.weight, products.head.bias)
    if grads[0] is not None and isinstance(index, Tensor):
        grads[0] = torch.zeros_like(products.hidden, dtype=grads[0].dtype).index_copy_(0, index, grads[0])
    return [None if x is None or y is None else x.to(y.dtype) for x, y in zip(grads, inputs, strict=True)]


def gradients(products: Products, needs: tuple[bool, ...], of_tile: TileGradient) -> list[Tensor | None]:
    """The gradients of hidden states, weight and bias, each only where wanted, summed over the tiles in float32."""
    hidden, weight, buffer = products.hidden, products.head.weight, products.buffer
    wide = upcast(hidden[:0]).dtype
    columns, chunks = tiles(hidden, weight)
    columns = columns if buffer is None else buffer.columns
    d_hidden = torch.zeros_like(hidden, dtype=wide) if needs[0] else None
    d_weight = (torch.empty_like(weight) if buffer is None else buffer.d_weight) if needs[1] else None
    d_bias = weight.new_zeros(weight.shape[0], dtype=wide) if needs[2] else None
    for entries in columns:
        part = weight.new_zeros(weight[entries].shape, dtype=wide) if needs[1] and len(chunks) != 1 else None
        for rows in chunks:
            d = of_tile(rows, entries)
            if d_bias is not None:
                d_bias[entries] += d.sum(0, dtype=wide)
            d = d.to(hidden.dtype)
            if d_hidden is not None:
                _add_product(d_hidden[rows], d, weight[entries])
            if part is not None:
                _add_product(part, d.t(), hidden[rows])
            elif d_weight is not None:
                torch.mm(d.t(), hidden, out=d_weight[entries])
        if part is not None and d_weight is not None:  # all rows at once: their products are in its memory
            d_weight[entries] = part
    return [d_hidden, d_weight, d_bias]


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


Function = TypeVar("Function", bound=Callable[..., Any])


def opaque(function: Function) -> Function:
    """Keeps calls of a function out of torch.compile's graph, since which rows count depends on the data."""

    @functools.wraps(function)
    def called(*args: Any, **choices: Any) -> Any:
        compiling = torch.compiler.is_compiling()
        return (cast(Any, torch.compiler).disable(function) if compiling else function)(*args, **choices)

    return cast(Function, called)


def check_head(name: str, hidden: Tensor, head: Head) -> None:
    """Refuse hidden states and a head that do not fit together, and a scale that no logits can be divided by."""
    weight, bias = head.weight, head.bias
    check_tensors(FLOATS, **{f"{name} hidden states": hidden, f"{name} head's weight": weight})
    check_values_exist(f"{name} hidden states", hidden)
    if bias is not None:
        check_tensors(FLOATS, like=hidden, **{f"{name} head's bias": bias})
    fits = hidden.ndim == 2 and weight.ndim == 2 and hidden.shape[1] == weight.shape[1] and weight.shape[0] > 0
    if not fits or (bias is not None and bias.shape != weight.shape[:1]):
        with_bias = "" if bias is None else f", bias {tuple(bias.shape)}"
        raise ShapeError(
            f"{name} hidden states and head do not fit together",
            got=f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}{with_bias}",
            why="the logits are hidden [N, H] times weight [V, H] transposed, plus bias [V]",
            fix="flatten the hidden states to [N, H] and pass lm_head.weight unchanged",
        )
    if hidden.dtype != weight.dtype and not torch.is_autocast_enabled(hidden.device.type):
        raise ConfigError(
            f"{name} hidden states and weight differ in type",
            got=f"hidden {hidden.dtype}, weight {weight.dtype}",
            why="a linear layer refuses it too: one of them would have to be copied",
            fix="cast one of them, or call under torch.autocast",
        )
    divides = POSITIVE.but("the logits are divided by it", "use the sampler's or the model configuration's")
    check_number("temperature", head.temperature, divides)
    check_number("softcap", head.softcap, divides, optional=True)


@opaque
def run_walk(function: type[torch.autograd.Function], head: Head, *tensors: Tensor | None, **choices: Any) -> Any:
    """What an autograd function of the heads returns for these tensors, the first of which are hidden states.

    They get the type that autocast would give the inputs of a linear layer; the function itself runs without.
    """
    weight, stays = head.weight, (torch.float64, torch.long)
    if torch.is_autocast_enabled(weight.device.type):
        dtype = torch.get_autocast_dtype(weight.device.type)
        tensors = tuple(x if x is None or x.dtype in stays else x.to(dtype) for x in tensors)
    owner = weight.device, weight.data_ptr()
    walk = Walk((head.temperature, head.softcap), owner, torch.is_grad_enabled(), **choices)
    with torch.autocast(weight.device.type, enabled=False):
        return applied(function, *tensors, walk)

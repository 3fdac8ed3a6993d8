"""Any operator along the tokens, one after another: what a user may write, and no layer is known for.

Expressions of ``x``, ``[B, T, D]``. ``n`` divides ``T``; ``picks`` ``[B, T]`` and ``perm`` ``[T]`` hold
places of tokens, ``taken`` ``[B, T]`` booleans.
"""

from __future__ import annotations

from .writer import Writer

ORDERS = (  # the same rows in other places
    "torch.roll(x, 1, 1)",
    "torch.roll(x, -2, 1)",
    "torch.roll(x, T // n, 1)",
    "torch.roll(x, (1, 2), (1, 2))",
    "torch.roll(x, 1, 0)",
    "x.flip(1)",
    "x.flip(0, 1)",
    "torch.cat((x[:, 1:], x[:, :1]), 1)",
    "torch.cat(x.chunk(2, 1)[::-1], 1)",
    "torch.cat([x[:, i::n] for i in range(n)], 1)",
    "torch.stack([x[:, (i + 1) % n::n] for i in range(n)], 2).flatten(1, 2)",
    "x.unflatten(1, (-1, n)).flip(2).flatten(1, 2)",
    "x.unflatten(1, (-1, n)).flip(1).flatten(1, 2)",
    "x.unflatten(1, (-1, n)).roll(1, 2).flatten(1, 2)",
    "x.unflatten(1, (-1, n)).transpose(1, 2).reshape(B, T, D)",
    "x.unflatten(1, (n, -1)).transpose(1, 2).reshape(B, T, D)",
    "x.unflatten(1, (n, -1)).roll(1, 1).flatten(1, 2)",
    "x.transpose(1, 2).reshape(B, T, D)",
    "x.transpose(0, 1).reshape(B, T, D)",
    "x.reshape(B, D, T).transpose(1, 2)",
    "x.index_select(1, perm)",
    "x[:, perm]",
    "x[torch.arange(B)[:, None], picks]",
    "x.gather(1, picks[..., None].expand(-1, -1, D))",
    "torch.take_along_dim(x, picks[..., None], 1)",
    "x[:, torch.arange(T).flip(0)]",
    "x[:, torch.arange(T) // n * n]",
    "x[:, torch.arange(T) % n]",
    "x[:, (torch.arange(T) - n).clamp(min=0)]",
    "x[:, torch.arange(T) - n]",
    "x[:, ::n].repeat_interleave(n, 1)",
    "x[:, : T // n].repeat(1, n, 1)",
    "x[:, ::n, None].expand(-1, -1, n, -1).flatten(1, 2)",
    "F.pad(x, (0, 0, n, -n))",
    "F.pad(x.transpose(1, 2), (1, 1), mode='circular').transpose(1, 2)[:, 2:]",
    "F.pad(x.transpose(1, 2), (2, 0), mode='reflect').transpose(1, 2)[:, :-2]",
    "F.pad(x.transpose(1, 2), (1, 1), mode='replicate').transpose(1, 2)[:, :-2]",
    "F.pad(x.narrow(1, 1, T - n), (0, 0, 1, n - 1))",
    "x.sort(1).values",
    "x.gather(1, x[..., :1].argsort(1).expand_as(x))",
    "torch.where(taken[..., None], x, x.roll(1, 1))",
    "x.slice_scatter(x[:, :n] * 2, 1, n, 2 * n)",
    "x.select_scatter(x[:, 1], 1, n)",
    "torch.zeros_like(x).index_add(1, perm, x)",
    "torch.zeros_like(x).index_copy(1, perm, x)",
    "torch.zeros_like(x).scatter_add(1, picks[..., None].expand_as(x), x)",
    "torch.zeros_like(x).index_put((torch.arange(B)[:, None], picks), x, accumulate=True)",
    "torch.zeros_like(x).index_add(1, torch.arange(T) // n, x)",
)
MIXES = (  # rows that are made of several
    "x.cumsum(1) / T",
    "x.flip(1).cumsum(1).flip(1) / T",
    "x.cumsum(1) / T - x",
    "(1 + 0.1 * x.tanh()).cumprod(1)",
    "x.tanh().logcumsumexp(1)",
    "x.cummax(1).values",
    "x.flip(1).cummin(1).values",
    "x.unflatten(1, (-1, n)).cumsum(2).flatten(1, 2)",
    "x.unflatten(1, (-1, n)).cumsum(1).flatten(1, 2) / T",
    "x.softmax(1) * T",
    "x.softmax(0)",
    "x.unflatten(1, (-1, n)).softmax(2).flatten(1, 2)",
    "x.unflatten(1, (n, -1)).softmax(1).flatten(1, 2)",
    "F.normalize(x, dim=1)",
    "F.normalize(x, dim=0)",
    "F.layer_norm(x, (T, D))",
    "F.instance_norm(x.transpose(1, 2)).transpose(1, 2)",
    "F.batch_norm(x.transpose(1, 2), None, None, training=True).transpose(1, 2)",
    "x - x.mean(1, keepdim=True)",
    "x - x[:, :1]",
    "x * x[:, -1:].tanh()",
    "x - x.unflatten(1, (-1, n)).mean(2).repeat_interleave(n, 1)",
    "torch.diff(x, dim=1, prepend=x[:, :1])",
    "torch.gradient(x, dim=1)[0]",
    "F.pad(x, (0, 0, 2, 0)).unfold(1, 3, 1).mean(-1)",
    "F.avg_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2)",
    "F.max_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2)",
    "F.interpolate(F.avg_pool1d(x.transpose(1, 2), n), scale_factor=n).transpose(1, 2)",
    "F.interpolate(x.transpose(1, 2), size=2 * T, mode='linear').transpose(1, 2)[:, ::2]",
    "F.pad(x, (0, 0, 2, 0))[:, torch.arange(T)[:, None] + torch.arange(3)].amax(2)",
    "x @ (x.mT @ x).tanh() / T",
    "(x @ x.mT).softmax(-1) @ x",
    "(x @ x.mT).softmax(-2) @ x / T",
    "(x @ x.mT).tril() @ x / T",
    "(x @ x.mT).tril(-1) @ x / T",
    "(x @ x.mT).triu(1).tanh() @ x / T",
    "(x @ x.mT).tanh().tril(2).triu(-2) @ x",
    "(x @ x.mT).flip(2).softmax(-1) @ x",
    "(x @ x.mT).roll(1, 1).softmax(-1) @ x",
    "((x[:, :, None] - x[:, None]) ** 2).sum(-1).neg().exp() @ x / T",
    "torch.tanh(x[:, :, None] + x[:, None]).mean(2)",
    "(x[:, :, None] + x[:, None]).amax(1)",
    "(picks[:, :, None] == picks[:, None]).to(x.dtype) @ x / T",
    "F.one_hot(picks, T).to(x.dtype) @ x",
    "x.gather(1, (x @ x.mT).argmax(-1, keepdim=True).expand_as(x))",
    "F.scaled_dot_product_attention(x, x, x, is_causal=True)",
    "F.scaled_dot_product_attention(x, x.roll(1, 1), x.flip(1))",
    "F.scaled_dot_product_attention(x, x[:, ::n], x[:, ::n])",
    "F.scaled_dot_product_attention(*[x.transpose(0, 1)] * 3).transpose(0, 1)",
    "F.scaled_dot_product_attention(*[x.mT] * 3).mT",
    "F.scaled_dot_product_attention(*[x.unflatten(1, (-1, n))] * 3).flatten(1, 2)",
    "F.scaled_dot_product_attention(*[x.unflatten(1, (n, -1))] * 3).flatten(1, 2)",
    "F.scaled_dot_product_attention(*[x.view(B, -1, n, D).mT] * 3).mT.flatten(1, 2)",
    "F.scaled_dot_product_attention(x[:, -1:], x, x) * x",
)
NUMBERS = (  # one number for each token, or one row for each sequence, to multiply with
    "x.norm(dim=-1, keepdim=True)",
    "x[..., :1].cumsum(1) / T",
    "x[..., :1].softmax(1) * T",
    "x[..., :1].argsort(1).argsort(1) / T",
    "(x @ x.mT).diagonal(dim1=1, dim2=2)[..., None].tanh()",
    "(x @ x.mT).amax(-1, keepdim=True).tanh()",
    "taken.cumsum(1)[..., None] / T",
    "x.cummax(1).indices / T",
    "x.amax(1, keepdim=True)",
    "x.amin((0, 1))",
    "x.std(1, keepdim=True)",
    "x.norm(dim=1, keepdim=True)",
    "x.median(1, keepdim=True).values",
    "x.logsumexp(1, keepdim=True)",
    "(1 + 0.05 * x).prod(1, keepdim=True)",
    "x.quantile(0.3, 1, keepdim=True)",
    "x.topk(2, 1).values.mean(1, keepdim=True)",
    "x.gather(1, picks[:, :1, None].expand(-1, -1, D))",
    "x.var()",
    "x.amax()",
)
BLOCKS = (  # blocks of ``n`` rows, each by itself or beside the others
    "x.reshape(B, -1, n * D).tanh().reshape(B, T, D)",
    "(x.reshape(B, -1, n * D) * 2).softmax(-1).reshape(B, T, D) * n",
    "x.unflatten(1, (-1, n)).softmax(2).flatten(1, 2)",
    "x.unflatten(1, (-1, n)).cumsum(2).flatten(1, 2)",
    "x.unflatten(1, (-1, n)).amax(2).repeat_interleave(n, 1)",
    "x.unflatten(1, (-1, n)).mean(2, keepdim=True).expand(-1, -1, n, -1).flatten(1, 2)",
    "F.pad(x.unflatten(1, (-1, n)).mean(2), (0, 0, 1, -1)).repeat_interleave(n, 1)",
    "F.scaled_dot_product_attention(*[x.unflatten(1, (-1, n)).mean(2)] * 3).repeat_interleave(n, 1)",
    "F.scaled_dot_product_attention(*[x.unflatten(1, (-1, n))] * 3).flatten(1, 2)",
    "F.scaled_dot_product_attention(x, *[x.unflatten(1, (-1, n)).mean(2)] * 2)",
    "(x.unflatten(1, (-1, n)) @ x.unflatten(1, (-1, n)).mT).tril().flatten(1, 2) @ x[0, :n]",
    "x.view(-1, n, D).roll(1, 1).view(B, T, D)",
    "x.view(-1, n, D).flip(1).cumsum(1).flip(1).view(B, T, D)",
    "x.reshape(B, -1, n * D)[..., :D].repeat_interleave(n, 1)",
)
MOVES = (  # of all rows; some are above as well, and are picked more often
    "F.pad(x, (0, 0, n - 1, 1 - n))",
    "F.pad(x, (0, 0, 1, 0))[:, :T]",
    "F.pad(x, (0, 0, -1, 1))",
    "torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), 1)",
    "x.roll(1, 1)",
    "x.cumsum(1) / T",
    "x.flip(1)",
    "x - x.mean(1, keepdim=True)",
    "F.layer_norm(x, (D,))",
    "x[:, -1:].tanh()",
)
INPUTS = dict(
    picks="torch.randint(length, (BATCH, length), generator=make)",
    perm="torch.randperm(length, generator=make)",
    taken="torch.rand(BATCH, length, generator=make) > 0.3",
)


def any_operator(w: Writer, x: str) -> str:
    """One to three operators along the tokens, with something that is done to each token in between."""
    w.do(f"n = {w.sizes.patch}")
    for name, made in INPUTS.items():
        w.given(name, made)
    for _ in range(w.pick(1, 2, 2, 3)):
        w.do(f"x = {x}")
        w.do("B, T, D = x.shape")
        table = w.pick(ORDERS, ORDERS, MIXES, MIXES, NUMBERS)
        made = w.let(w.pick(*table), "y")
        x = w.let(
            w.pick(f"x * {made}.tanh()", f"x + 0.3 * {made}")
            if table is NUMBERS
            else w.pick(f"x + 0.3 * {made}", f"x * {made}.tanh()", f"{made}.tanh()", f"x - {made}.sigmoid()")
        )
    return w.linear(x, w.sizes.width, w.sizes.width)


def padded_operators(w: Writer, x: str) -> str:
    """The same on tokens that are padded to whole blocks, of which as many as there were are taken again."""
    n = w.sizes.patch
    rows = f"(length + -length % {n})"
    w.do(f"n, length = {n}, {x}.shape[1]")
    for name, made in INPUTS.items():
        w.given(name, made.replace("length", rows))
    tokens = x
    x = w.let(f"F.pad({x}, (0, 0, 0, -length % n))")
    for _ in range(w.pick(1, 2, 2, 3, 3)):
        w.do(f"x = {x}")
        w.do("B, T, D = x.shape")
        table = w.pick(BLOCKS, BLOCKS, BLOCKS, MOVES, MOVES, ORDERS, MIXES)
        made = w.let(w.pick(*table), "y")
        x = w.let(w.pick(made, made, f"x + 0.3 * {made}", f"x * {made}.tanh()", f"x - {made}.sigmoid()"))
    x = w.let(w.pick(f"{x}[:, :length]", f"{x}.narrow(1, 0, length)"))
    x = w.let(w.pick(x, f"{tokens} + {x}", f"{tokens} * {x}.tanh()"))
    return w.linear(x, w.sizes.width, w.sizes.width)

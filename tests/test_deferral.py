"""Wide values that no later attention needs are computed after it."""

import pytest
import torch
from graphs import Written

from streambp_compile.passes.deferral import deferred

aten = torch.ops.aten
ROWS, WIDTH, WORDS = 4, 3, 40


class Two:
    """Two models that run one after the other: ``first`` and ``second`` stand for their attention, and
    ``early`` is a wide value of the first, made before the second runs."""

    def __init__(self):
        write = Written()
        x, y = (write.given(name, torch.randn(ROWS, WIDTH)) for name in ("x", "y"))
        weight = write.given("weight", torch.randn(WIDTH, WORDS))
        first = write("first", aten.cos.default, x)
        self.early = write("early", aten.mm.default, first, weight)
        self.scaled = write("scaled", aten.mul.Tensor, self.early, 2.0)
        self.count = write("count", aten.sum.default, self.early)
        self.write, self.second = write, write("second", aten.sin.default, y)
        self.late = write("late", aten.mm.default, self.second, weight)
        self.mixers = {first, self.second}

    def order(self, *more, written=()) -> list[str]:
        body = [n for n in self.write.graph.nodes if n.op == "call_function"]
        size = {n: n.meta["val"].nbytes for n in body}
        size.update(more)
        return [n.name for n in deferred(body, size, self.mixers, written)]


AS_WRITTEN = ["first", "early", "scaled", "count", "second", "late", "both"]


@pytest.fixture
def two():
    two = Two()
    two.write("both", aten.add.Tensor, two.scaled, two.late)
    return two


def test_a_wide_value_waits_for_no_attention(two):
    names = two.order()
    assert names[:2] == ["first", "second"]
    assert names.index("early") < names.index("scaled") < names.index("both")
    assert names.index("early") < names.index("count")


def test_the_order_stays_where_nothing_wide_waits(two):
    narrow = [(n, WIDTH * ROWS * 4) for n in (two.early, two.scaled, two.late)]
    assert two.order(*narrow) == AS_WRITTEN


def test_what_attention_needs_stays():
    two = Two()
    fed = two.write("fed", aten.mm.default, two.scaled, two.write.given("back", torch.randn(WORDS, WIDTH)))
    two.mixers.add(fed)
    two.write("both", aten.add.Tensor, two.scaled, two.late)
    assert two.order()[:5] == ["first", "early", "scaled", "count", "second"]


def test_what_is_written_into_stays(two):
    assert two.order(written={two.scaled}) == AS_WRITTEN


def test_what_may_not_wait_moves_at_any_price(two):
    matrices = [(n, -1) for n in (two.early, two.scaled)]
    assert two.order(*matrices).index("second") < two.order(*matrices).index("early")

"""Where a model is cut: the regions of a two-layer model written by hand, as text."""

from dataclasses import replace

import pytest
import torch
from graphs import Written

from streambp_compile.passes.split import Region, Traits, split

aten, streambp = torch.ops.aten, torch.ops.streambp
LENGTH, WIDTH, WORDS = 5, 8, 100


def model(layers: int = 2, head: bool = True, returned: bool = False, image: bool = False) -> Written:
    """Embedding, layers ``x + attention(x w · angles)``, and a loss on logits. ``returned``: the function
    also returns ``angles``. ``image``: tokens are patches, to which learned positions are added."""
    write = Written()
    ids, table = (
        write.given("ids", torch.zeros(LENGTH, dtype=torch.int64)),
        write.given("table", weight(WORDS, WIDTH)),
    )
    weights = [write.given(f"w{i}", weight(WIDTH, WIDTH)) for i in range(1, layers + 1)]
    angles = write(
        "angles",
        aten.unsqueeze.default,
        write("turns", aten.cos.default, write("places", aten.arange.default, LENGTH)),
        1,
    )
    x = patches(write) if image else write("x0", aten.embedding.default, table, ids)
    for i, w in enumerate(weights, 1):
        turned = write(f"turned{i}", aten.mul.Tensor, write(f"product{i}", aten.mm.default, x, w), angles)
        heads = write(f"heads{i}", aten.view.default, turned, [1, 1, LENGTH, WIDTH])
        a = write(
            f"attend{i}",
            torch.nn.functional.scaled_dot_product_attention,
            heads,
            heads,
            heads,
            is_causal=True,
        )
        x = write(f"x{i}", aten.add.Tensor, x, write(f"mixed{i}", aten.view.default, a, [LENGTH, WIDTH]))
    if head:
        logits = write("logits", aten.mm.default, x, write("across", aten.t.default, table))
        x = write("loss", aten.mean.default, write("scores", aten.logsumexp.default, logits, [1]))
    write.graph.output((x, angles) if returned else x)
    return write


def patches(write: Written):
    given = (write.given("pixels", torch.randn(LENGTH * 4, 3)), write.given("taps", weight(3, WIDTH // 4)))
    positions = write.given("positions", weight(LENGTH, WIDTH))
    rows = write("rows", aten.view.default, write("patches", aten.mm.default, *given), [LENGTH, WIDTH])
    return write("x0", aten.add.Tensor, rows, positions)


def weight(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(shape))


def traits_of(graph) -> dict:
    """What the backend would find; here a dimension of five is one of tokens."""
    found = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            tokens, size = LENGTH in value.shape, value.numel() * value.dtype.itemsize
            matrix = value.is_floating_point() and value.dim() >= 2
            found[node] = Traits(size, value.requires_grad, tokens, matrix, node.name.startswith("attend"))
    return found


def regions(write: Written, traits=None) -> tuple[Region, ...]:
    return split(write.graph, traits or traits_of(write.graph), lambda node: False)


REGIONS = """
ids, table, w1 → x1: places, turns, angles, x0, product1, turned1, heads1, attend1, mixed1, x1
w2, x1 → x2: places, turns, angles, product2, turned2, heads2, attend2, mixed2, x2
table, x2 → loss: across, logits, scores, loss
"""


def test_cuts_lie_between_layers_where_one_value_is_alive():
    assert "\n".join(map(str, regions(model()))) == REGIONS.strip()


def test_every_node_is_kept_once_and_only_cheap_ones_are_made_again():
    write = model(4)
    made = [n.name for r in regions(write) for n in r.nodes]
    assert {n.name for n in write.graph.nodes} - {"output"} - {
        n.name for n in write.graph.nodes if n.op == "placeholder"
    } == set(made)
    assert {n for n in made if made.count(n) > 1} == {"places", "turns", "angles"}


BEHIND_TURNS = """
ids, table, w1, turns → x1: angles, x0, product1, turned1, heads1, attend1, mixed1, x1
w2, turns, x1 → x2: angles, product2, turned2, heads2, attend2, mixed2, x2
table, x2 → loss: across, logits, scores, loss
"""


def test_what_runs_before_all_regions_is_made_in_none():
    write = model()
    found = split(write.graph, traits_of(write.graph), lambda node: node.name in ("places", "turns"))
    assert "\n".join(map(str, found)) == BEHIND_TURNS.strip()


def test_a_region_reads_only_what_exists():
    known = set()
    for region in regions(model(3)):
        inside = known | set(region.nodes)
        assert all(n.op == "placeholder" or n in known for n in region.inputs)
        assert all(a in inside or a in region.inputs for n in region.nodes for a in n.all_input_nodes)
        known |= set(region.outputs)


PRELUDE = """
ids, table → x0: x0
w1, x0 → x1: places, turns, angles, product1, turned1, heads1, attend1, mixed1, x1
"""


@pytest.mark.parametrize("light", (True, False))
def test_an_embedding_that_can_be_made_again_leaves_the_first_layer_equal_to_the_others(light):
    write = model(3)
    traits = {n: replace(t, recomputable=light and n.name == "x0") for n, t in traits_of(write.graph).items()}
    found = regions(write, traits)
    assert [r.recomputable for r in found] == [light] + [False] * (len(found) - 1)
    assert ("\n".join(map(str, found)).startswith(PRELUDE.strip())) == light


PATCHES = """
pixels, taps, positions → x0: patches, rows, x0
w1, x0 → x1: places, turns, angles, product1, turned1, heads1, attend1, mixed1, x1
"""


def test_an_embedding_that_makes_the_tokens_is_cut_off_whatever_is_added_to_them():
    """Learned positions have a row for each token, and the pixels have none."""
    found = regions(model(3, image=True))
    assert "\n".join(map(str, found)).startswith(PATCHES.strip())
    assert not any(region.recomputable for region in found)


def test_one_layer_without_a_head_is_one_region():
    (region,) = regions(model(1, head=False))
    assert [n.name for n in region.outputs] == ["x1"]


def test_a_mixer_as_wide_as_the_logits_shares_their_region():
    """A pointer network adds copies of words in the text to the softmax. No logits cross a cut."""
    write = model(head=False)
    x = next(iter(write.graph.output_node().all_input_nodes))
    write.graph.erase_node(write.graph.output_node())
    words = write("words", aten.mm.default, x, write("across", aten.t.default, named(write, "table")))
    scores = write("softmax", aten._softmax.default, words, -1, False)
    copies = write("attend_to_words", aten.mul.Tensor, scores, scores)
    mixed = write("mixture", aten.add.Tensor, scores, copies)
    write.graph.output(write("loss", aten.mean.default, write("logs", aten.log.default, mixed)))
    assert [[n.name for n in r.outputs] for r in regions(write)] == [["x1"], ["x2"], ["loss"]]


def named(write: Written, name: str):
    return next(n for n in write.graph.nodes if n.name == name)


def test_a_value_with_users_in_two_regions_crosses_once():
    write = model(2)
    nodes = {n.name: n for n in write.graph.nodes}
    nodes["mixed2"].args = (nodes["attend2"], [LENGTH, WIDTH])
    with write.graph.inserting_before(nodes["x2"]):
        again = write("again", aten.add.Tensor, nodes["mixed2"], nodes["mixed1"])
    nodes["x2"].args = (nodes["x1"], again)
    first, second, _ = regions(write)
    assert [n.name for n in first.outputs] == ["mixed1", "x1"]
    assert [n.name for n in second.inputs] == ["w2", "mixed1", "x1"]


def test_a_cheap_value_that_is_returned_is_made_in_the_last_region():
    last = regions(model(2, returned=True))[-1]
    assert {n.name for n in last.outputs} == {"loss", "angles"}


def test_the_graph_is_left_alone_and_needs_no_metadata():
    write = model()
    traits, before = traits_of(write.graph), str(write.graph)
    for node in write.graph.nodes:
        node.meta.clear()
    assert "\n".join(map(str, regions(write, traits))) == REGIONS.strip()
    assert str(write.graph) == before


@pytest.mark.parametrize("layers", (3, 5))
def test_equal_layers_become_equal_regions(layers):
    kinds = [[str(n.target) for n in r.nodes] for r in regions(model(layers))][1:-1]
    assert all(k == kinds[0] for k in kinds)


@pytest.mark.parametrize("filters, held", [(2, [2]), (3, [2, 1]), (7, [2, 2, 2, 1])])
def test_filters_that_read_one_another_share_a_region_two_at_a_time(filters, held):
    """Two stacks of dilated convolutions, each with a sum of its results: within a stack, three values are
    alive."""
    write = Written()
    x = write("x", torch.add, write.given("input", torch.randn(LENGTH, WIDTH)), 1.0)
    for stack in ("a", "b"):
        before, total = x, None
        for i in range(filters):
            mixed = write(f"filter_{stack}{i}", torch.cumsum, x, 0)
            x = write(f"hidden_{stack}{i}", torch.add, mixed, x)
            total = mixed if total is None else write(f"total_{stack}{i}", torch.add, total, mixed)
        x = write(f"behind_{stack}", torch.add, write(f"both_{stack}", torch.add, x, total), before)
    write.graph.output((x,))
    known = traits_of(write.graph)
    mixers = {n for n in known if n.name.startswith("filter")}
    known |= {n: replace(known[n], mixing=True, attends=False) for n in mixers}
    found = [sum(n in mixers for n in region.nodes) for region in regions(write, known)]
    assert [count for count in found if count] == 2 * held

"""Several sequences in one model: an encoder beside a decoder, patches of images, latents that read a text;
each streams along its own."""

import pytest
import torch
import torch.nn.functional as F
from models import VOCABULARY, Layer, Plain, gradients, ids_of, worst_error
from selection import representatives
from torch import Tensor, nn

from streambp_compile import NotStreamed, explain
from streambp_compile.backend import streambp
from streambp_compile.passes.ir import hint

pytestmark = pytest.mark.usefixtures("interpreted")
EXACT = 1e-10
WIDTH = 32


class Attention(nn.Module):
    """Queries of one sequence over keys of another (or the same); with a bias looked up by distance, as T5
    has it, where it is given."""

    def __init__(self, causal: bool = False):
        super().__init__()
        self.causal = causal
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor, bias: Tensor | None = None) -> Tensor:
        q, k, v = (
            p(t).unflatten(-1, (4, -1)).transpose(1, 2) for p, t in ((self.q, x), (self.k, y), (self.v, y))
        )
        scores = q @ k.transpose(-1, -2) if bias is None else q @ k.transpose(-1, -2) + bias
        if self.causal:
            scores = scores.masked_fill(
                torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf")
            )
        return x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, causal: bool, crosses: bool):
        super().__init__()
        self.own, self.cross = Attention(causal), Attention() if crosses else None
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor, bias: Tensor | None = None, memory: Tensor | None = None) -> Tensor:
        x = self.own(x, x, bias)
        x = x if self.cross is None else self.cross(x, memory)
        return x + self.down(F.gelu(self.up(x)))


class Hourglass(nn.Module):
    """Layers of tokens, layers of a token for each four, and back (arXiv 2110.13711)."""

    def __init__(self, linear: bool):
        super().__init__()
        self.embed, self.linear = nn.Embedding(VOCABULARY, WIDTH), linear
        self.layers = nn.ModuleList(Block(True, False) for _ in range(4))
        if linear:
            self.shorten, self.lengthen = nn.Linear(4 * WIDTH, WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.layers[0](self.embed(ids))
        before = F.pad(x, (0, 0, 3, -3)).unflatten(1, (-1, 4))
        short = self.shorten(before.flatten(2)) if self.linear else before.mean(2)
        for layer in self.layers[1:3]:
            short = layer(short)
        back = self.lengthen(short).view_as(x) if self.linear else short.repeat_interleave(4, 1)
        x = self.layers[3](x + back)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Translator(nn.Module):
    """The first layer looks the bias up for all of them; its index is counted in place."""

    def __init__(self):
        super().__init__()
        self.embed, self.distance = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(16, 4)
        self.encoder = nn.ModuleList([Block(False, False) for _ in range(2)])
        self.decoder = nn.ModuleList([Block(True, True) for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def bias(self, length: int) -> Tensor:
        places = torch.arange(length)
        index = (places[:, None] < places[None, :]).long() * 8
        index += (places[:, None] - places[None, :]).abs().clamp(max=7)
        return self.distance(index).permute(2, 0, 1)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, bias = self.embed(source), self.bias(source.shape[1])
        for block in self.encoder:
            memory = block(memory, bias)
        x = self.embed(target)
        for block in self.decoder:
            x = block(x, memory=memory)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), target[:, 1:].flatten())


@pytest.mark.slow
def test_an_encoder_streams_beside_its_decoder():
    model = Translator().double()
    report = explain(model, ids_of(2, 61), ids_of(2, 45), streambp_options={"chunk_size": 16})
    assert all(r.streamed for r in report.regions), report
    assert {r.analysis.length for r in report.regions} == {61, 45} == set(report.lengths)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return streambp(graph, inputs, options={"chunk_size": 16})

    torch._dynamo.reset()
    step = torch.compile(model, backend=backend)
    for of_source, of_target in ((61, 45), (40, 53), (33, 72), (50, 50)):
        batch = ids_of(2, of_source), ids_of(2, of_target)
        assert (
            worst_error(gradients(model, lambda: step(*batch)), gradients(model, lambda: model(*batch)))
            < EXACT
        )
    assert len(graphs) == 2


class Patches(nn.Module):
    """An image of patches behind a class token; the class is read from the first row."""

    def __init__(self, layers: int = 3):
        super().__init__()
        self.cut, self.first = nn.Conv2d(3, WIDTH, 4, 4), nn.Parameter(torch.randn(1, 1, WIDTH))
        self.layers, self.head = (
            nn.ModuleList([Block(False, False) for _ in range(layers)]),
            nn.Linear(WIDTH, 10),
        )

    def forward(self, image: Tensor) -> Tensor:
        x = self.cut(image).flatten(2).transpose(1, 2)
        return self.after(torch.cat((self.first.expand(len(x), -1, -1), x), 1))

    def after(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x[:, 0]), torch.arange(len(x)))


@pytest.mark.long
@pytest.mark.quick
def test_layers_over_patches_of_an_image_stream():
    """The patch embedding does not, which costs nothing: no warning, and no error where all is to stream."""
    model, image = Patches().double(), torch.randn(2, 3, 32, 32, dtype=torch.float64)
    report = explain(model, image, streambp_options={"chunk_size": 16, "strict": True})
    assert "creates its tokens" in str(report.regions[0].refusal)
    assert [r.times for r in report.regions if r.streamed] == [3, 1] and report.lengths == [65]
    step = torch.compile(model, backend="streambp", options={"chunk_size": 16})
    for height, width in ((32, 32), (40, 24), (48, 20)):
        image = torch.randn(2, 3, height, width, dtype=torch.float64)
        assert (
            worst_error(gradients(model, lambda: step(image)), gradients(model, lambda: model(image))) < EXACT
        )


class Captions(nn.Module):
    """Causal text in front of which an image's patches are read by cross-attention."""

    def __init__(self):
        super().__init__()
        self.image, self.embed = Patches(2), nn.Embedding(VOCABULARY, WIDTH)
        self.layers, self.head = (
            nn.ModuleList([Block(True, True) for _ in range(2)]),
            nn.Linear(WIDTH, VOCABULARY),
        )
        self.image.after = self.patches
        del self.image.head

    def patches(self, x: Tensor) -> Tensor:
        for layer in self.image.layers:
            x = layer(x)
        return x

    def forward(self, image: Tensor, ids: Tensor) -> Tensor:
        memory, x = self.image(image), self.embed(ids)
        for layer in self.layers:
            x = layer(x, memory=memory)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Latents(nn.Module):
    """Few learned rows read a long text, see one another, and are read by it again."""

    def __init__(self):
        super().__init__()
        self.embed, self.latents = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(torch.randn(1, 24, WIDTH))
        self.read, self.think, self.back = Attention(), Block(False, False), Attention()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        latents = self.think(self.read(self.latents.expand(len(ids), -1, -1), x))
        return F.cross_entropy(self.head(self.back(x, latents)).flatten(0, 1), ids.flatten())


class Prefix(nn.Module):
    """Learned rows in front of a text: layers see more tokens than there are."""

    def __init__(self):
        super().__init__()
        self.embed, self.prefix = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(torch.randn(1, 7, WIDTH))
        self.layers, self.head = (
            nn.ModuleList([Layer(WIDTH, 4) for _ in range(2)]),
            nn.Linear(WIDTH, VOCABULARY),
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.cat((self.prefix.expand(len(ids), -1, -1), self.embed(ids)), 1)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x[:, 7:])[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Shared(nn.Module):
    """The same layers over two sequences, which meet in a loss over pairs."""

    def __init__(self):
        super().__init__()
        self.embed, self.layers = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.ModuleList([Layer(WIDTH, 4) for _ in range(2)]),
        )

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        found = []
        for x in (self.embed(a), self.embed(b)):
            for layer in self.layers:
                x = layer(x)
            found.append(F.normalize(x.mean(1), dim=-1))
        return F.cross_entropy(found[0] @ found[1].T * 10, torch.arange(len(a)))


class Preference(nn.Module):
    """DPO whose chosen and rejected texts come as two inputs of their own lengths."""

    def __init__(self):
        super().__init__()
        self.embed, self.layers = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.ModuleList([Layer(WIDTH, 4) for _ in range(2)]),
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def log_probability(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1).sum(-1)

    def forward(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return -F.logsigmoid(0.1 * (self.log_probability(chosen) - self.log_probability(rejected))).mean()


class Shifted(nn.Module):
    """The model itself parts inputs from targets: layers see one token fewer than there are."""

    def __init__(self):
        super().__init__()
        self.embed, self.layers = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.ModuleList([Layer(WIDTH, 4) for _ in range(2)]),
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids[:, :-1])
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids[:, 1:].flatten())


ODD = [
    (Shifted, lambda: (ids_of(2, 61),), 4),
    pytest.param(Preference, lambda: (ids_of(2, 61), ids_of(2, 45)), 7, marks=pytest.mark.slow),
    pytest.param(
        Captions,
        lambda: (torch.randn(2, 3, 32, 24, dtype=torch.float64), ids_of(2, 45)),
        4,
        marks=pytest.mark.slow,
    ),
    pytest.param(Latents, lambda: (ids_of(2, 61),), 3, marks=pytest.mark.slow),
    pytest.param(Prefix, lambda: (ids_of(2, 61),), 3, marks=pytest.mark.slow),
    pytest.param(Shared, lambda: (ids_of(3, 61), ids_of(3, 45)), 4, marks=pytest.mark.slow),
    pytest.param(Shared, lambda: (ids_of(3, 61), ids_of(3, 61)), 2, marks=pytest.mark.slow),
]


@pytest.mark.filterwarnings("ignore:streambp cannot stream a region")
@pytest.mark.parametrize(
    "made, batch, streamed",
    ODD,
    ids=["shifted", "preferences", "captions", "latents", "prefix", "pairs", "equal pairs"],
)
def test_sequences_that_meet(made, batch, streamed):
    model, given = made().double(), batch()
    step = torch.compile(model, backend="streambp", options={"chunk_size": 16})
    assert (
        worst_error(gradients(model, lambda: step(*given)), gradients(model, lambda: model(*given))) < EXACT
    )
    torch._dynamo.reset()
    report = explain(model, *given, streambp_options={"chunk_size": 16})
    assert sum(r.times for r in report.regions if r.streamed) >= streamed, report


class InPlace(nn.Module):
    """A bias by distance whose index is changed behind a reader's back: no region may make it anew in another
    order."""

    def __init__(self, write):
        super().__init__()
        self.embed, self.distance, self.write = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(80, 4), write
        self.layers = nn.ModuleList([Attention() for _ in range(3)])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        places = torch.arange(ids.shape[1])
        index = (places[:, None] - places[None, :]).abs()
        bias, again = self.write(index, self.distance)
        x = self.layers[2](self.layers[1](self.layers[0](x, x, bias), x, again), x, bias)
        return x.square().mean()


def after_a_view(index, table):
    seen = index.view(1, *index.shape)[0]
    index += 3
    return table(seen).permute(2, 0, 1), table(index).permute(2, 0, 1)


def between(index, table):
    first = index * -0.1
    index.add_(5)
    return first, table(index).permute(2, 0, 1)


def by_item(index, table):
    index[3] = 7
    index[:, 5:].clamp_(max=4)
    return table(index).permute(2, 0, 1), table(index.t()).permute(2, 0, 1)


def twice(index, table):
    index += 2
    index *= 2
    return table(index.clamp(max=79)).permute(2, 0, 1), table(index.clamp(max=11)).permute(2, 0, 1)


@pytest.mark.filterwarnings("ignore:streambp cannot stream a region")
@pytest.mark.parametrize(
    "write",
    [
        pytest.param(after_a_view, marks=pytest.mark.slow),
        pytest.param(between, marks=pytest.mark.slow),
        by_item,
        pytest.param(twice, marks=pytest.mark.slow),
    ],
)
def test_what_is_written_in_place_is_made_once_or_as_it_was(write):
    model, ids = InPlace(write).double(), ids_of(2, 41)
    step = torch.compile(model, backend="streambp", options={"chunk_size": 16})
    assert worst_error(gradients(model, lambda: step(ids)), gradients(model, lambda: model(ids))) < EXACT


class InTurn(nn.Module):
    """States and actions in turn: two rows of attention for each step of the inputs, of which one
    predicts."""

    def __init__(self):
        super().__init__()
        self.state, self.action, self.predict = nn.Linear(5, WIDTH), nn.Linear(3, WIDTH), nn.Linear(WIDTH, 3)
        self.layers = nn.ModuleList([Block(True, False) for _ in range(2)])

    def forward(self, states: Tensor, actions: Tensor) -> Tensor:
        x = torch.stack([self.state(states), self.action(actions)], 2).flatten(1, 2)
        for layer in self.layers:
            x = layer(x)
        return (self.predict(x.unflatten(1, (-1, 2))[:, :, 0]) - actions).square().mean()


@pytest.mark.filterwarnings("ignore:streambp cannot stream a region")
@pytest.mark.slow
def test_several_rows_for_each_token_are_a_sequence_of_their_own():
    """What makes them streams along the steps, the layers along their rows."""
    model = InTurn().double()
    step = torch.compile(model, backend="streambp", options={"chunk_size": 16})
    for length in (45, 30):
        given = torch.randn(2, length, 5).double(), torch.randn(2, length, 3).double()
        assert (
            worst_error(gradients(model, lambda: step(*given)), gradients(model, lambda: model(*given)))
            < EXACT
        )
        with torch.no_grad():
            torch.testing.assert_close(step(*given), model(*given), rtol=1e-12, atol=0)
    report = explain(model, *given)
    streamed = [r for r in report.regions if r.streamed is not None]
    assert {hint(r.analysis.length) for r in streamed} == {30, 60}
    assert all("causal, proved" in str(r) for r in streamed if hint(r.analysis.length) == 60)
    assert all(r.has_nothing_to_stream for r in report.regions if r not in streamed)


@pytest.mark.filterwarnings("ignore:streambp cannot stream a region")
def test_layers_over_several_rows_for_each_token_stream_along_these(interpreted):
    """However many tokens there are: those of the inputs are no dimension of their own in the layers."""
    model, given = InTurn().double(), (torch.randn(2, 70, 5).double(), torch.randn(2, 70, 3).double())
    report = explain(model, *given)
    assert {hint(r.analysis.length) for r in report.regions if r.streamed is not None} == {70, 140}
    assert all(r.streamed is not None or r.has_nothing_to_stream for r in report.regions)


@pytest.mark.slow
@pytest.mark.parametrize("linear", [False, True])
def test_an_hourglass_streams(linear, interpreted):
    model = Hourglass(linear).double()
    step = torch.compile(model, backend="streambp", options={"chunk_size": 16, "strict": True})
    for length in (64, 96):
        ids = ids_of(2, length)
        assert worst_error(gradients(model, lambda: step(ids)), gradients(model, lambda: model(ids))) < EXACT


@pytest.mark.long
def test_a_text_of_one_token():
    """Shifted losses have no rows then: reshapes of empty values have no place for tokens."""
    model = Plain(layers=1).double()

    def loss(ids):
        logits = model.head(model.norm(model.layers[0](model.embed(ids))))
        losses = F.cross_entropy(
            logits[:, :-1].reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1), reduction="none"
        )
        return losses.sum() + logits.square().mean()

    step = torch.compile(loss, backend="streambp")
    for length in (1, 40):
        ids = ids_of(2, length)
        ours, truth = (gradients(model, lambda: f(ids)) for f in (step, loss))
        assert worst_error(ours, truth) < 1e-10


class Bytes(nn.Module):
    """Layers of patches of some bytes; layers of the bytes within each patch (arXiv 2305.07185)."""

    def __init__(self, causal: bool, patch: int, layers: int):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.shorten, self.lengthen = nn.Linear(patch * WIDTH, WIDTH), nn.Linear(WIDTH, patch * WIDTH)
        self.of_patches = nn.ModuleList(Layer(WIDTH, 4) for _ in range(layers))
        self.of_bytes = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(layers))
        self.causal, self.patch = causal, patch

    def within(self, x: Tensor, qkv: nn.Linear) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return x + mixed.transpose(1, 2).flatten(2)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        patches = self.shorten(x.unflatten(1, (-1, self.patch)).flatten(2))
        for layer in self.of_patches:
            patches = layer(patches)
        before = F.pad(patches, (0, 0, 1, -1))
        x = self.lengthen(before).reshape(-1, self.patch, WIDTH) + x.reshape(-1, self.patch, WIDTH)
        for qkv in self.of_bytes:
            x = self.within(x, qkv)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


@pytest.mark.long
@pytest.mark.parametrize("case", representatives(((False, 4, 1), (True, 4, 1), (True, 8, 2)), {(True, 8, 2)}))
def test_attention_within_patches_streams_along_the_patches(case):
    model, patch = Bytes(*case).double(), case[1]
    step = torch.compile(model, backend="streambp", options={"chunk_size": 8, "strict": True})
    for length in (64, 96):
        ids = ids_of(2, length)
        found, expected = (gradients(model, lambda f=f: f(ids)) for f in (step, model))
        assert worst_error(found, expected) < EXACT
    torch._dynamo.reset()
    report = explain(model, ids_of(2, 96))
    if patch >= 8:  # whose bytes might be tokens themselves
        assert {hint(r.analysis.length) for r in report.regions if r.analysis} == {96 // patch}, report


@pytest.mark.long
def test_few_latents_are_not_what_a_long_text_streams_along():
    report = explain(Latents(), ids_of(2, 2048), streambp_options={"chunk_size": 64})
    assert hint(report.regions[0].analysis.length) == 2048, report


class Frames(nn.Module):
    """Patches of a frame attend to one another, then each patch to the same one of earlier frames (arXiv
    2103.15691, model 3)."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 4)
        self.in_space, self.in_time = (
            nn.ModuleList(Block(t, False) for _ in range(2)) for t in (False, True)
        )

    def forward(self, video: Tensor) -> Tensor:
        batch, frames, patches, _ = video.shape
        x = self.inner(video)
        for in_space, in_time in zip(self.in_space, self.in_time):
            x = in_space(x.reshape(batch * frames, patches, WIDTH)).view(batch, frames, patches, WIDTH)
            x = in_time(x.transpose(1, 2).reshape(batch * patches, frames, WIDTH))
            x = x.view(batch, patches, frames, WIDTH).transpose(1, 2)
        return (self.head(x[:, :-1]) - video[:, 1:]).square().mean()


@pytest.mark.long
def test_attention_within_frames_streams_along_the_frames():
    model, given = Frames().double(), torch.randn(2, 66, 9, 4, dtype=torch.float64)
    step = torch.compile(model, backend="streambp", options={"chunk_size": 16, "strict": True})
    found, expected = (gradients(model, lambda f=f: f(given)) for f in (step, model))
    assert worst_error(found, expected) < EXACT
    torch._dynamo.reset()
    report = explain(model, given)
    assert {hint(r.analysis.length) for r in report.regions} == {66}, report


class Captioner(nn.Module):
    """Learned queries read an image, and stand before a text whose layers see both (arXiv 2301.12597)."""

    def __init__(self):
        super().__init__()
        self.inner, self.queries = nn.Linear(4, WIDTH), nn.Parameter(torch.randn(9, WIDTH))
        self.cross, self.embed = Attention(), nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Layer(WIDTH, 4) for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, image: Tensor, ids: Tensor) -> Tensor:
        found = self.cross(self.queries.expand(len(image), -1, -1), self.inner(image))
        x = torch.cat([found, self.embed(ids)], 1)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x[:, 9:-1]).flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.long
def test_a_text_behind_a_prompt_streams_along_both():
    """The rows of the text alone are no sequence of these layers, although all their values have them."""
    model, given = Captioner().double(), (torch.randn(2, 70, 4, dtype=torch.float64), ids_of(2, 80))
    step = torch.compile(model, backend="streambp", options={"chunk_size": 16, "strict": True})
    found, expected = (gradients(model, lambda f=f: f(*given)) for f in (step, model))
    assert worst_error(found, expected) < EXACT
    torch._dynamo.reset()
    report = explain(model, *given)
    assert 89 in {hint(r.analysis.length) for r in report.regions if r.streamed}, report


class Prompted(Plain):
    """Rows of a prompt come first, and leave before the head."""

    PROMPT = 32

    def forward(self, ids, labels):
        prompt = torch.arange(self.PROMPT).repeat(len(ids), 1)
        x = self.embed(torch.cat((prompt, ids), 1))
        for layer in self.layers:
            x = layer(x)
        return self.loss(x[:, self.PROMPT :], labels)


@pytest.mark.long
def test_rows_that_leave_are_no_other_sequence():
    """The head reads those that stay; no region holds them at full length for it."""
    torch.manual_seed(0)
    model, ids = Prompted().double(), torch.randint(30, (2, 77))
    report = explain(model, ids, ids)
    assert [r.times for r in report.regions] == [1, 2, 1] and all(r.streamed for r in report.regions)
    step = torch.compile(model, backend="streambp", options=dict(chunk_size=24))
    found, truth = (gradients(model, lambda: f(ids, ids)) for f in (step, model))
    assert worst_error(found, truth) < EXACT


class PatchedText(nn.Module):
    """Patches of four tokens behind a start row, where half of each row comes from the row before; each patch
    is told from the row before it (MEGABYTE, arXiv 2305.07185)."""

    def __init__(self):
        super().__init__()
        self.embed, self.start = nn.Embedding(VOCABULARY, 8), nn.Parameter(torch.randn(WIDTH))
        self.into, self.out = nn.Linear(32, WIDTH), nn.Linear(WIDTH, 32)
        self.layers = nn.ModuleList([Layer(WIDTH, 4) for _ in range(2)])

    def forward(self, ids: Tensor) -> Tensor:
        patches = self.embed(ids.view(len(ids), -1, 4))
        x = torch.cat([self.start.expand(len(ids), 1, -1), self.into(patches.flatten(2))], 1)
        for layer in self.layers:
            here, before = x.chunk(2, -1)
            x = layer(torch.cat([here, F.pad(before, (0, 0, 1, -1))], -1))
        return (self.out(x[:, :-1]).unflatten(-1, (4, 8)) - patches).square().mean()


@pytest.mark.long
def test_patches_of_ids_behind_a_start_row():
    """Row 0 of the ids is of the token that row 1 of the layer is of, in whatever shape the ids are."""
    model, ids = PatchedText().double(), ids_of(2, 72)
    step = torch.compile(model, backend="streambp", options={"chunk_size": 8})
    found, truth = (gradients(model, lambda: f(ids)) for f in (step, model))
    assert worst_error(found, truth) < EXACT


class Registers(Plain):
    """Rows of their own before and behind a text that is as long as its table of positions."""

    def __init__(self):
        super().__init__(width=WIDTH)
        self.positions, self.rows = nn.Embedding(70, WIDTH), nn.Parameter(torch.randn(6, WIDTH))

    def forward(self, ids, labels):
        rows, places = self.rows.expand(len(ids), -1, -1), torch.ones_like(ids).cumsum(1) - 1
        x = torch.cat((rows, self.embed(ids) + self.positions(places), rows), 1)
        for layer in self.layers:
            x = layer(x)
        return self.loss(x[:, 6:-6], labels)


@pytest.mark.parametrize("chunk", [None, 16])
def test_rows_that_no_text_has_look_up_no_position(chunk):
    """A chunk computes positions of rows of which the text has none: none of them is in the table."""
    model, ids = Registers().double(), ids_of(2, 70)
    step = torch.compile(model, backend="streambp", options={"chunk_size": chunk})
    found, truth = (gradients(model, lambda: f(ids, ids)) for f in (step, model))
    assert worst_error(found, truth) < EXACT


class SortedPatches(nn.Module):
    """Patches of four tokens whose experts' rows are sorted, worked on, and put back."""

    def __init__(self):
        super().__init__()
        self.embed, self.into, self.out = nn.Embedding(VOCABULARY, 8), nn.Linear(32, 8), nn.Linear(8, 32)
        self.router, self.experts = nn.Linear(8, 3), nn.Parameter(torch.randn(3, 8, 8))

    def forward(self, ids: Tensor) -> Tensor:
        tokens = self.embed(ids)
        x = self.into(self.embed(ids.view(len(ids), -1, 4)).flatten(2)).tanh()
        share, chosen = self.router(x).softmax(-1).topk(2)
        rows, order = x.flatten(0, 1), chosen.flatten().argsort(stable=True)
        made = torch.bmm(rows[order // 2][:, None], self.experts[chosen.flatten()[order]])[:, 0]
        made = made * share.flatten()[order][:, None]
        x = x + torch.zeros_like(rows).index_add(0, order // 2, made).view_as(x)
        return (tokens + self.out(x).unflatten(-1, (4, 8)).flatten(1, 2)).square().mean()


@pytest.mark.long
def test_experts_of_patches_run_unchunked():
    """Rows that are sorted inside blocks are of no block. Gradients are exact."""
    model, ids = SortedPatches().double(), ids_of(3, 48)
    step = torch.compile(model, backend="streambp", options={"chunk_size": 8})
    with pytest.warns(NotStreamed, match="splits the token dimension"):
        found, truth = (gradients(model, lambda: f(ids)) for f in (step, model))
    assert worst_error(found, truth) < EXACT


@pytest.mark.long
def test_rows_of_one_number_beside_a_text_of_any_length():
    """A suffix whose one-hot rows want gradients, and a target that is all whose logits are read (GCG, arXiv
    2307.15043)."""
    model = Plain(layers=2).double().requires_grad_(False)

    def loss(ids: Tensor, suffix: Tensor, target: Tensor) -> Tensor:
        table = model.embed.weight
        x = torch.cat((model.embed(ids), suffix @ table, model.embed(target)), 1)
        for layer in model.layers:
            x = layer(x)
        logits = model.head(model.norm(x))[:, -target.shape[1] - 1 : -1]
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())

    step = torch.compile(loss, backend="streambp", options={"chunk_size": 8, "strict": True})
    for length in (30, 47):
        ids, target = ids_of(2, length), ids_of(2, 12)
        suffix = F.one_hot(ids_of(2, 10), VOCABULARY).double().requires_grad_()
        found, expected = (torch.autograd.grad(f(ids, suffix, target), suffix) for f in (step, loss))
        assert (found[0] - expected[0]).abs().max() < EXACT * expected[0].abs().max()

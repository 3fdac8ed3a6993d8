"""What passes through the door to torch: artifacts in the structured trace, and regions that are kept whole."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from graphs import joint_of, without_inductor
from models import Plain, gradients, ids_of, worst_error
from streambp_compile.passes.ir import Analysis

from streambp_compile import NotStreamed, Report, explain, internals

NAMES = ("split", "joint", "normalized", "facts", "forward", "forward_body_0")


def test_every_graph_of_every_region_goes_to_the_structured_trace(monkeypatch, fresh_dynamo):
    without_inductor(monkeypatch)
    artifacts = {}
    monkeypatch.setattr(internals, "trace_structured", lambda _kind, metadata_fn, payload_fn: artifacts.update(
        {metadata_fn()["name"]: payload_fn}))
    model, ids = Plain(layers=3), ids_of(1, 64)
    report = explain(lambda ids: model(ids, ids), ids)
    for i, region in enumerate(report.regions):
        assert {f"streambp_region_{i}_{name}" for name in NAMES} <= artifacts.keys()
        assert (f"streambp_region_{i}_backward_body_0" in artifacts) == bool(region.backward and region.backward.bodies)
    assert "streambp.attention" in artifacts["streambp_region_1_forward_body_0"]()
    assert "tangents_1" in artifacts["streambp_region_1_joint"]()
    assert "b [t] d" in artifacts["streambp_region_1_facts"]()
    assert artifacts["streambp_region_1_backward"]().startswith(("whole:", "ascending", "descending"))
    assert "3 distinct" in artifacts["streambp_report"]()


def test_nothing_is_written_down_unless_a_trace_is_on(monkeypatch, fresh_dynamo):
    without_inductor(monkeypatch)
    monkeypatch.setattr(internals, "trace_structured", lambda _kind, metadata_fn, payload_fn: None)
    monkeypatch.setattr(Analysis, "table", None)
    monkeypatch.setattr(Report, "__str__", None)
    model, ids = Plain(layers=1), ids_of(1, 64)
    explain(lambda ids: model(ids, ids), ids)


def test_a_trace_folder_receives_them(tmp_path):
    script = "import torch, models; m = models.Plain(layers=1); torch.compile(m, backend='streambp')(*2 * [models.ids_of(1, 64)])"
    subprocess.run([sys.executable, "-c", script], env={**os.environ, "TORCH_TRACE": str(tmp_path)}, cwd=os.path.dirname(__file__), check=True)
    written = "".join(path.read_text() for path in tmp_path.iterdir())
    assert '"name": "streambp_report"' in written and '"name": "streambp_region_0_joint"' in written


def test_a_whole_region_with_attention_keeps_its_inputs_alone():
    """Its kernels are tagged as random, but without dropout they draw nothing, and what they made need not be kept."""

    def attend(x):
        heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads * 2, heads, heads, is_causal=True).exp()

    joint, outputs, tangents = joint_of(attend, torch.randn(1, 6, 8, requires_grad=True))
    values = [n.meta["val"] for n in joint.graph.nodes if n.op == "placeholder"]
    forward, _ = internals.keep_inputs_partition(joint, (values[:-tangents], values[-tangents:]), num_fwd_outputs=outputs)
    returned = next(n for n in forward.graph.nodes if n.op == "output").args[0]
    assert [n.op for n in returned[outputs:]] == ["placeholder"]


def test_an_op_with_effects_keeps_its_region_whole_and_exact(fresh_dynamo):
    model, ids = Plain(layers=1).double(), ids_of(1, 64)

    def loss(ids):  # an inverse checks for errors, which is an effect
        x = model.layers[0](model.embed(ids))
        return model.loss(x + torch.linalg.inv(x.transpose(1, 2) @ x + torch.eye(64, dtype=x.dtype)).sum(), ids)

    with pytest.warns(NotStreamed, match="_linalg_check_errors.* has an effect"):
        found = gradients(model, lambda: torch.compile(loss, backend="streambp")(ids))
    assert worst_error(found, gradients(model, lambda: loss(ids))) < 1e-8

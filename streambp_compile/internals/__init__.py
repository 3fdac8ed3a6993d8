"""The only place that imports private parts of torch: a new release of torch changes these files alone.

The rest of the package takes what it needs from here, by the names below.
"""

import logging

from torch._dynamo.backends.common import aot_autograd
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes

from .associative_scans import is_traced_for, trace_scans_as
from .aten_graphs import (
    LIFTS,
    before_autograd,
    capture,
    captured_after,
    decompositions,
    has_gradient,
    inline_numbers,
    known_number,
    newest_captured,
)
from .body_inputs import BodyInputs
from .chosen_values import is_zero_without
from .chunk_bodies import body_options, compile_body
from .distributed import (
    Engine,
    HeadApart,
    apart_from_ddp,
    freed_by,
    heads_apart,
    is_ddp_piece,
    is_fsdp_hook,
    is_sharded,
    keep_ddp_graphs_whole,
)
from .dynamo import (
    ASSERTIONS,
    MODE_SWITCHES,
    NO_DEFECTS,
    PADDINGS,
    DisableTorchFunctionSubclass,
    GraphBreak,
    HigherOrderOperator,
    OneAtATime,
    enter_autocast,
    enter_inference,
    enter_map,
    exit_autocast,
    exit_inference,
    forget_dynamic_sizes,
    graph_break,
    ignore_library_logging,
    ignore_library_logging_from_now_on,
    in_autocast,
    index_by_tensors,
    is_compiled_backward,
    is_hook,
    is_transform,
    leave_map,
    make_constant,
    modes_text,
    outside_of_metrics,
    replaying,
    set_grad_enabled,
    symbolic_functions,
    trace_methods_of_attributes,
    without_compiled_autograd,
)
from .fake_tensors import (
    as_these,
    assert_size,
    describe,
    faked,
    has_symbols,
    is_batched,
    is_fake,
    is_unbacked,
    parts_of,
    stand_in,
    stand_in_whole,
    without_guards,
)
from .inductor import compile_function, compile_graph, compile_plainly, rewrite
from .joint_graphs import effects_inside, floats_are_tensors, keep_inputs_partition, tracing_of
from .numbers_asked import number_read
from .picked_branches import begin_branch, end_branch
from .picked_rows import break_at_picked_rows, capture_picked_rows, capture_with_picked_rows
from .read_numbers import break_at_read_numbers, break_where_numbers_are_read, reading_no_numbers
from .running_step import (
    apart_from_checkpoint,
    are_saved_tensors_packed,
    assert_on_device,
    graph_is_kept,
    in_custom_forward,
    use_counts,
)
from .simulated_artifacts import generated, generated_line, without_code, without_device, without_kernels
from .size_guards import guard_of
from .structured_trace import trace_artifact
from .value_checks import trace_value_checks_as_assertions

__all__ = [
    "ASSERTIONS",
    "BodyInputs",
    "DisableTorchFunctionSubclass",
    "Engine",
    "FakeTensorMode",
    "GraphBreak",
    "HigherOrderOperator",
    "LIFTS",
    "MODE_SWITCHES",
    "NO_DEFECTS",
    "OneAtATime",
    "PADDINGS",
    "TorchDispatchMode",
    "aot_autograd",
    "apart_from_checkpoint",
    "are_saved_tensors_packed",
    "apart_from_ddp",
    "assert_on_device",
    "assert_size",
    "before_autograd",
    "body_options",
    "capture",
    "captured_after",
    "compile_body",
    "compile_function",
    "compile_graph",
    "compile_plainly",
    "decompositions",
    "describe",
    "has_symbols",
    "detect_fake_mode",
    "disable_current_modes",
    "effects_inside",
    "end_branch",
    "enter_autocast",
    "enter_inference",
    "enter_map",
    "exit_autocast",
    "exit_inference",
    "faked",
    "floats_are_tensors",
    "forget_dynamic_sizes",
    "freed_by",
    "HeadApart",
    "heads_apart",
    "generated",
    "generated_line",
    "graph_break",
    "has_gradient",
    "graph_is_kept",
    "use_counts",
    "guard_of",
    "ignore_library_logging",
    "ignore_library_logging_from_now_on",
    "in_autocast",
    "outside_of_metrics",
    "in_custom_forward",
    "index_by_tensors",
    "inline_numbers",
    "known_number",
    "is_batched",
    "is_compiled_backward",
    "is_ddp_piece",
    "is_fake",
    "is_fsdp_hook",
    "is_hook",
    "is_sharded",
    "is_traced_for",
    "is_traceable_wrapper_subclass",
    "is_transform",
    "begin_branch",
    "break_at_picked_rows",
    "break_at_read_numbers",
    "break_where_numbers_are_read",
    "capture_picked_rows",
    "capture_with_picked_rows",
    "is_unbacked",
    "is_zero_without",
    "keep_ddp_graphs_whole",
    "keep_inputs_partition",
    "leave_map",
    "log",
    "make_constant",
    "make_fx",
    "modes_text",
    "newest_captured",
    "number_read",
    "reading_no_numbers",
    "parts_of",
    "replaying",
    "rewrite",
    "set_grad_enabled",
    "stand_in",
    "stand_in_whole",
    "symbolic_functions",
    "trace_artifact",
    "trace_methods_of_attributes",
    "trace_scans_as",
    "trace_value_checks_as_assertions",
    "tracing_of",
    "as_these",
    "without_code",
    "without_compiled_autograd",
    "without_device",
    "without_guards",
    "without_kernels",
]

log = logging.getLogger(__name__)

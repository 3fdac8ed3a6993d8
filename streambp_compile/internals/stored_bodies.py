"""Compiled chunk bodies on disk, beside Inductor's own cache: a second process compiles none again.

Inductor's cache of graphs cannot hold them: it checks conditions on integers that are inputs, and a body
also has sizes that only its tensors determine. An entry therefore holds the conditions as `size_guards`
writes them. Its key is made of the text of the body and its inputs, their hints, the options of
Inductor, the device, and the sources of torch and of this package. An entry is written atomically, so
that several processes may write it. An entry that cannot be read counts as missing.

Tested with torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import logging
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.codecache import CacheBase, FxGraphCache, torch_key, write_atomic
from torch._inductor.output_code import CompiledFxGraph, CompiledFxGraphConstants
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._ops import HigherOrderOperator
from torch.compiler._cache import CacheArtifact, CacheArtifactFactory, CacheArtifactManager
from torch.fx import GraphModule

from .kernel_builds import prepare_compiler

log = logging.getLogger(__name__)
PACKAGE = Path(__file__).resolve().parents[1]
OWN_PASSES = (  # functions of the user that rewrite graphs inside Inductor, and have no text to compare
    "post_grad_custom_pre_pass",
    "post_grad_custom_post_pass",
    "joint_custom_pre_pass",
    "joint_custom_post_pass",
    "_pre_fusion_custom_pass",
    "_post_fusion_custom_pass",
)


@functools.cache
def own_key() -> str:
    """Compute a digest of the sources of this package."""
    digest = hashlib.sha256()
    for path in sorted([*PACKAGE.rglob("*.py"), *(PACKAGE / "passes").resolve().rglob("*.py")]):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def is_on() -> bool:
    """Do the user's settings of Inductor allow a cache on disk?"""
    config = inductor_config
    ours = any(callable(getattr(config, name, None)) for name in OWN_PASSES)
    return config.fx_graph_cache and not config.force_disable_caches and not ours


def key_of(graph: GraphModule, text: str, hints: Sequence[int], on_cpu: bool) -> str | None:
    """Compute the name of an entry; None where the text hides part of a body, or the cache is off.

    text    of the body, of its inputs, and of Inductor's options that are not private
    hints   of its sizes, in tokens or elements, which decide how Inductor writes the code
    on_cpu  does it run on a CPU, with the vector instructions of this one?
    """
    if not is_on() or any(is_hidden(n.op, n.target) for n in graph.graph.nodes):
        return None
    private = inductor_config.save_config_portable(ignore_private_configs=False)
    modes = (torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype(), torch.get_num_threads())
    vectors = prepare_compiler().result() if on_cpu else ""
    system = (CacheBase.get_system(), vectors, torch.__version__, torch_key(), own_key())
    told = (text, [*hints], sorted(private.items(), key=str), modes, system)
    return hashlib.sha256(repr(told).encode()).hexdigest()


def is_hidden(op: str, target: object) -> bool:
    """Does a node read a value that its text does not show: a constant, a graph or a kernel?"""
    return op in ("get_attr", "call_module") or isinstance(target, HigherOrderOperator)


def folder() -> Path:
    """Return the folder of entries, beside those of Inductor."""
    return Path(cache_dir()) / "streambp"


def path_of(key: str) -> Path:
    return folder() / key[:2] / key


def read(key: str, examples: Sequence[object]) -> tuple[Callable, str] | None:
    """Load a compiled body, a function of its inputs as a list, and its conditions on sizes; or None."""
    try:
        content = path_of(key).read_bytes()
        graph, conditions = pickle.loads(content)
        constants = CompiledFxGraphConstants()
        loaded, _ = FxGraphCache.cache_hit_post_compile(graph, {}, constants)
        if loaded is None:
            return None
        loaded.post_compile(examples, constants, loaded.fx_kwargs)
    except FileNotFoundError:
        return None
    except Exception:
        log.debug("a stored chunk body could not be read", exc_info=True)
        return None
    CacheArtifactManager.record_artifact(StoredBody.type(), key, content)
    counters["streambp"]["bodies_loaded"] += 1
    return loaded, conditions


def write(key: str, run: Callable, conditions: str) -> None:
    """Store a compiled body; do nothing where it cannot be stored."""
    if not isinstance(run, CompiledFxGraph):
        return
    graph = copy.copy(run)
    try:
        graph.prepare_for_serialization()
        content = pickle.dumps((graph, conditions))
        write_atomic(str(path_of(key)), content, make_dirs=True)
        CacheArtifactManager.record_artifact(StoredBody.type(), key, content)
    except Exception:
        log.debug("a chunk body could not be stored", exc_info=True)


def compiling() -> contextlib.AbstractContextManager:
    """Set Inductor's options for compiling a body that is stored. It stores nothing itself, and bundles the
    Triton kernels with the code."""
    return functorch_config.patch(bundled_autograd_cache=True)


@CacheArtifactFactory.register
class StoredBody(CacheArtifact):
    """An entry that `torch.compiler.save_cache_artifacts` carries to another machine."""

    def populate_cache(self) -> None:
        write_atomic(str(path_of(self.key)), self.content, make_dirs=True)

    @staticmethod
    def type() -> str:
        return "streambp"

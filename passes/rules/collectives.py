"""Functional collectives: what a layer that is split over processes sends and receives.

A reduction over processes takes row t of every process for row t, so that all of them have to cut the tokens
at the same places. What gathers or scatters does so along the first dimension: rows along any other stay
where they are. Along the tokens themselves (sequence parallel) a process gets the rows of others, and all of
them at once. An exchange of parts always is of all rows: where processes compute with what they get in
different ways (in a ring, one skips what it cannot see), they still have to send alike.

None is called linear: a gradient is scaled by the tangent of this process, and others might have another.
"""

from __future__ import annotations

from torch.fx import Node

from ..ir import Signature, shape_of
from . import rule_by_name
from .facets import CostClass, Linear
from .signatures import broadcast

KERNEL = CostClass.KERNEL

rule_by_name(
    "_c10d_functional::wait_tensor", cost=CostClass.FREE, linear=Linear.of("tensor"), communicates=True
)(broadcast)
rule_by_name("_c10d_functional::all_reduce", "_c10d_functional::broadcast", cost=KERNEL, communicates=True)(
    broadcast
)


@rule_by_name(
    "_c10d_functional::all_gather_into_tensor",
    "_c10d_functional::reduce_scatter_tensor",
    cost=KERNEL,
    communicates=True,
)
def along_first(node: Node) -> Signature:
    """Along the first dimension lie the parts of several processes."""
    behind = tuple(range(1, len(shape_of(node))))
    return Signature((("parts", *behind),), ((None, *behind),), contracts="all")


@rule_by_name("streambp::gathered", "streambp::scattered", cost=KERNEL, communicates=True, along="dim")
def along_a_dimension(node: Node) -> Signature:
    """Along one dimension lie the parts of several processes."""
    apart, rank = node.args[1], len(shape_of(node))
    given = tuple("parts" if dim == apart else dim for dim in range(rank))
    return Signature(
        (given,), (tuple(None if dim == apart else dim for dim in range(rank)),), contracts="all"
    )


@rule_by_name(
    "_c10d_functional::all_to_all_single", "streambp::exchanged", cost=KERNEL, communicates=True, along=0
)
def of_all_rows(node: Node) -> Signature:
    """Along the first dimension lie the parts of several processes; other rows stay, and go all at once."""
    behind = tuple(range(1, len(shape_of(node))))
    return Signature((("parts", *behind),), ((None, *behind),), contracts="all", placed=frozenset(behind))

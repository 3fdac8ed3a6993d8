"""Functional collectives: operators by which a layer that is split over processes sends and receives.

A reduction over processes combines row t of every process, so all of them have to cut the tokens at the
same places. torch's gathers and scatters work along the first dimension, ``streambp::gathered`` and
``streambp::scattered`` along the one that they name. Rows along any other dimension stay where they are.
Along the tokens themselves (sequence parallel), a process gets the rows of others, all of them at once.
An exchange of parts always takes all rows: processes may compute with the parts in different ways (in a
ring, one skips parts that it cannot see), but all still have to send alike.

No collective is called linear: a gradient is scaled by the tangent of this process, and others might have
another.
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
    """Build the signature of a collective over parts along the first dimension."""
    behind = tuple(range(1, len(shape_of(node))))
    return Signature((("parts", *behind),), ((None, *behind),), contracts="all")


@rule_by_name("streambp::gathered", "streambp::scattered", cost=KERNEL, communicates=True, along="dim")
def along_a_dimension(node: Node) -> Signature:
    """Build the signature of a collective over parts along the dimension that its argument names."""
    apart, rank = node.args[1], len(shape_of(node))
    given = tuple("parts" if dim == apart else dim for dim in range(rank))
    return Signature(
        (given,), (tuple(None if dim == apart else dim for dim in range(rank)),), contracts="all"
    )


@rule_by_name(
    "_c10d_functional::all_to_all_single", "streambp::exchanged", cost=KERNEL, communicates=True, along=0
)
def of_all_rows(node: Node) -> Signature:
    """Build the signature of an exchange of parts along the first dimension. Other rows stay where they are,
    and are sent all at once."""
    behind = tuple(range(1, len(shape_of(node))))
    return Signature((("parts", *behind),), ((None, *behind),), contracts="all", placed=frozenset(behind))

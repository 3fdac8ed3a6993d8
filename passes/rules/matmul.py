"""Matrix products: the op is its equation, and the letter that carries tokens decides every role."""

from torch.fx import Node

from ..ir import Signature, refuse, shape_of
from . import rule, rule_by_name
from .facets import CostClass, Form
from .mask_domain import arithmetic
from .mask_domain.bounded import always, if_addend_is
from .signatures import aligned, equation

PRODUCT = CostClass.PRODUCT


def emit_mm(body, node: Node):
    """Write a product; one summed over rows is added straight into its accumulator. No partial result exists
    then."""
    if not body.adds_up(node):
        return body.copied(node)  # rows, or a sum per key
    return body.accumulate_mm(node, *map(body.summand, node.args[:2]))


@rule(
    "aten::mm",
    emit=emit_mm,
    cost=PRODUCT,
    linear="self * mat2",
    form=Form.MATRIX_PRODUCT,
    bounded=always,
)
def mm(node: Node) -> Signature:
    return equation(node, "mk,kn->mn")


@rule(
    "aten::bmm",
    emit=emit_mm,
    cost=PRODUCT,
    linear="self * mat2",
    form=Form.MATRIX_PRODUCT,
    bounded=always,
)
def bmm(node: Node) -> Signature:
    return equation(node, "bmk,bkn->bmn")


@rule(
    "streambp::contracted",
    cost=PRODUCT,
    linear="left * right",
    mask=arithmetic.contracted,
    bounded=always,
)
def contracted(node: Node) -> Signature:
    return equation(node, node.args[2])


@rule("aten::mv", cost=CostClass.FUSED, linear="self * vec")
def mv(node: Node) -> Signature:
    return equation(node, "mk,k->m")


@rule("aten::dot", cost=CostClass.FUSED, linear="self * tensor")
@rule("aten::vdot", cost=CostClass.FUSED, linear="self * other")
def dot(node: Node) -> Signature:
    return equation(node, "k,k->")


@rule("streambp::grouped_mm", cost=PRODUCT, linear="rows * weight")
def grouped_mm(node: Node) -> Signature:
    return equation(node, "rk,gkn,r->rn", contracts="all")


def emit_grouped_outer(body, node: Node):
    if not body.adds_up(node):
        return body.copy(node)
    return body.accumulate_grouped(
        node, body.summand(node.args[0]), body.summand(node.args[1]), body.read(node.args[2])
    )


@rule("streambp::grouped_outer", emit=emit_grouped_outer, cost=PRODUCT, linear="left * right")
def grouped_outer(node: Node) -> Signature:
    return Signature((("r", "k"), ("r", "n"), ("r",)), ((None, "k", "n"),))


def with_bias(node: Node, text: str) -> Signature:
    product = equation(node, text)
    bias = aligned(shape_of(node.args[0]), shape_of(node))
    return Signature(
        (tuple(product.outputs[0][i] if i is not None else None for i in bias), *product.operands),
        product.outputs,
        contracts="all",
    )


@rule(
    "aten::addmm",
    cost=PRODUCT,
    linear="self + mat1 * mat2",
    form=Form.MATRIX_PRODUCT,
    mask=arithmetic.product_added,
    bounded=if_addend_is,
)
def addmm(node: Node) -> Signature:
    return with_bias(node, "mk,kn->mn")


@rule(
    "aten::baddbmm",
    cost=PRODUCT,
    linear="self + batch1 * batch2",
    mask=arithmetic.product_added,
    bounded=if_addend_is,
)
def baddbmm(node: Node) -> Signature:
    return with_bias(node, "bmk,bkn->bmn")


# Products of sorted rows with a weight per group: torch's, and the stand-in of transformers where torch has
# no kernel (transformers/integrations/moe.py). They are rewritten for rows in the order of tokens before
# they come here.


@rule("aten::_grouped_mm", form=Form.GROUPED_PRODUCT)
def grouped_mm_of_sorted(node: Node) -> Signature:
    raise refuse(
        node,
        "This grouped product takes rows that are sorted by group, and the sort could not be undone",
        "Sort the rows inside the compiled function, and put them back in the same order",
    )


rule_by_name("transformers::grouped_mm_fallback", form=Form.GROUPED_PRODUCT)(grouped_mm_of_sorted)
rule_by_name("transformers::grouped_mm_fallback_backward", form=Form.GROUPED_PRODUCT_BACKWARD)(
    grouped_mm_of_sorted
)


@rule("aten::linalg_solve_triangular", cost=CostClass.KERNEL, linear="B")
def solve_triangular(node: Node) -> Signature:
    """Build the signature of a triangular solve. Matrices are solved one by one. Inside one, a row of the
    result reads all of the rows before it."""
    shape = shape_of(node)
    matrices, right = (shape_of(a) for a in node.args[:2])

    def batch(operand: tuple[int, ...]) -> tuple:
        return tuple(aligned(operand[:-2], shape[:-2]))

    left = node.kwargs.get("left", True)
    given, made = (("solved", "free"), (None, "free")) if left else (("free", "solved"), ("free", None))
    return Signature(
        ((*batch(matrices), "above", "beside"), (*batch(right), *given)),
        ((*range(len(shape) - 2), *made),),
        contracts="all",
    )

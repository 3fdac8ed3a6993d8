"""A mypy plugin: the arguments of a ``torch.fx`` node have the types that the schema of its op gives them.

torch declares them as one union of everything that an op may take, so that no expression with one of them
passes a checker. Here they are of any type, and everything else about a node keeps its own.
"""

from __future__ import annotations

from collections.abc import Callable

from mypy.plugin import AttributeContext, Plugin
from mypy.types import AnyType, Type, TypeOfAny


class NodeArguments(Plugin):
    def get_attribute_hook(self, fullname: str) -> Callable[[AttributeContext], Type] | None:
        return {
            "torch.fx.node.Node.args": positional,
            "torch.fx.node.Node.kwargs": by_name,
            "torch.fx.node.Node.target": anything,
        }.get(fullname)


def anything(_context: AttributeContext) -> Type:
    return AnyType(TypeOfAny.explicit)


def positional(context: AttributeContext) -> Type:
    return context.api.named_generic_type("builtins.tuple", [anything(context)])


def by_name(context: AttributeContext) -> Type:
    return context.api.named_generic_type(
        "builtins.dict", [context.api.named_generic_type("builtins.str", []), anything(context)]
    )


def plugin(_version: str) -> type[Plugin]:
    return NodeArguments

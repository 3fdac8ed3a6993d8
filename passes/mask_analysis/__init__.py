"""Prove which keys a mask hides, by an abstract interpretation of the mask's own subgraph.

Masks are made from ranges, comparisons and padding rows. Their evaluation over the domains of `domains` can
*prove* which part of a score matrix they hide. The facet ``mask`` of an op's row says what the op does to a
domain. An op without it gives an unknown value, and an unknown value prunes nothing.

Some proofs rest on numbers that only a call knows. The abstract value lists them, and they become
conditions that are checked when the graph runs. There are two reasons: an additive mask of lowest
numbers (not ``-inf``) empties a score only beside a visible key, and a stored mask may hold anything.
"""

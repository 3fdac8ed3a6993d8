"""Which keys a mask provably hides: an abstract interpretation of the mask's own subgraph.

Masks are made from ranges, comparisons and padding rows. Evaluated over the domains of `domains`, the part
of a score matrix that they hide can be *proved*.
The facet ``mask`` of an op's row says what the op does to a domain. An op without it gives an unknown value,
and an unknown value prunes nothing.

Where a proof rests on numbers that only a call knows, the abstract value lists them, and they become
conditions that are checked when the graph runs: an additive mask of lowest numbers (not ``-inf``) empties a
score only beside a visible key, and a stored mask may hold anything.
"""

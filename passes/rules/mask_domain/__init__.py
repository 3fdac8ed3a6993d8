"""Transfer functions of the mask analysis: the effect of each op on a mask's abstract value.

A row of the operator table names one of them as its facet ``mask``, and one of `bounded` as its facet
``bounded``. Domains are in `passes.mask_analysis.domains`.
"""

"""The algebra of streaming: graphs in, graphs out.

Every module here turns one immutable value into the next and knows nothing of ``torch.compile``::

    normalize → analyze → partition → lower

``ir`` holds the types that cross a pass, ``rules`` the one table that knows operators.
"""

"""Rewrites for blocks and windows of tokens: pooling, convolutions, layers that work block by block."""

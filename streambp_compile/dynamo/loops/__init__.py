"""Rewrites of loops that Dynamo has unrolled, over tokens, blocks or pieces of a loss; and of scans."""

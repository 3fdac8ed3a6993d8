"""Engines and trainers as people set them up, each a function that builds one for one `Way` of training."""

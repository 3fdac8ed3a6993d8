"""Outputs that nobody may read: tensors that compute themselves when they are looked at, and what is done
to them."""

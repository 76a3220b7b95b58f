"""Codecs, tiers and recomputation inside the graphs of `torch.compile`."""

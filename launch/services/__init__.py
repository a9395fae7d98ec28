"""Servers of rewards and of a reference model's log-probs: `rolemesh serve-rm`, `rolemesh serve-ref`."""

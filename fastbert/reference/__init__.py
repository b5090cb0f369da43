"""Plain PyTorch implementations: the specification of every op, and the one that is always there."""

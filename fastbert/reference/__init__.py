"""Plain PyTorch implementations: the specification of every op, and the one always there."""

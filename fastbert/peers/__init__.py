"""Other projects' kernels as implementations of an op, used only where they are named."""

"""The mathematics of a step. Functions of tensors and numbers."""

"""Saving and loading the ranks' tensors."""

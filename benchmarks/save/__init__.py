"""Saving and loading measured: this project beside its peers, interleaved in one run. See `__main__`."""

"""What a GPU changes: step time, the stall of a save, an emergency save, a resume. `python -m benchmarks.gpu`."""

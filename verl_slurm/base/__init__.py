"""What every package may use: errors, files, paths, processes, keys."""

"""Commands before a first run: a configuration, the cluster, a demonstration."""

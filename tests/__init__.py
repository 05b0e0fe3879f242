"""A package by name: what pip installs for verl brings a top-level `tests` of its own, which would come first."""

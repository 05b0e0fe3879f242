"""The checks of the configuration, one module per section."""

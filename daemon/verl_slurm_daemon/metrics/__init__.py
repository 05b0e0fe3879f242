"""The metrics ports: their numbers, the text format, HTTP."""

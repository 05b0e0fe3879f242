"""Metrics ports: numbers, exposition, HTTP."""

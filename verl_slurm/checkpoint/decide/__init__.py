"""Decides what to save, keep and resume from. Pure: values in, reasons out."""
